"""Ids to text: stop strings across tokens, split UTF-8, ends of the output, padded and special ids."""

from __future__ import annotations

import mlx_lm
import pytest
from toys import save_byte_tokenizer, save_tiny

from mlx_spec.errors import UnsupportedError
from mlx_spec.text import Emitter, encode_chat, encode_prompt


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return mlx_lm.load(str(save_tiny(tmp_path_factory.mktemp("tiny"))))[1]


def run(tokenizer, text: str, max_tokens: int = -1, stop: tuple[str, ...] = ()) -> tuple[list[str], str | None]:
    emitter, finish = Emitter(tokenizer, max_tokens, stop), None
    for token in tokenizer.encode(text, add_special_tokens=False):
        finish = emitter.take(token)
        if finish:
            break
    return emitter.segments + ([] if finish else [emitter.flush()]), finish


def test_plain_text_comes_token_by_token(tokenizer):
    segments, finish = run(tokenizer, "abc")
    assert segments == ["a", "b", "c", ""] and finish is None


def test_a_character_split_over_tokens_comes_whole(tokenizer):
    segments, _ = run(tokenizer, "é日")
    assert "".join(segments) == "é日"
    assert all("\ufffd" not in segment for segment in segments)
    assert segments[0] == "" and segments[2:4] == ["", ""]


def test_a_cut_character_is_shown_as_a_replacement_at_the_end_only(tokenizer):
    ids = tokenizer.encode("a日", add_special_tokens=False)
    emitter = Emitter(tokenizer, 3)
    assert [emitter.take(token) for token in ids[:3]] == [None, None, "length"]
    assert "".join(emitter.segments) == "a\ufffd"


@pytest.mark.parametrize("stop", [("xyz",), ("yz", "xyz"), ("q", "xyz")])
def test_a_stop_string_across_tokens_is_cut_and_never_shown(tokenizer, stop):
    segments, finish = run(tokenizer, "ab xyz cd", stop=stop)
    assert finish == "stop"
    shown = "".join(segments)
    assert shown == ("ab x" if "yz" in stop and stop[0] == "yz" and "xyz" not in stop else "ab ")


def test_a_false_start_of_a_stop_string_is_released(tokenizer):
    segments, finish = run(tokenizer, "abxyxyw", stop=("xyz",))
    assert "".join(segments) == "abxyxyw" and finish is None
    assert segments[2] == "" and segments[3] == ""  # held back


def test_overlapping_start(tokenizer):
    segments, finish = run(tokenizer, "aab", stop=("ab",))
    assert "".join(segments) == "a" and finish == "stop"


def test_eos_is_not_shown_and_stops(tokenizer):
    emitter = Emitter(tokenizer, -1)
    emitter.take(tokenizer.encode("a", add_special_tokens=False)[0])
    assert emitter.take(0) == "stop"
    assert emitter.segments == ["a", ""]


def test_the_limit_is_exact_and_releases_what_was_held(tokenizer):
    segments, finish = run(tokenizer, "abxy", max_tokens=4, stop=("xyz",))
    assert finish == "length" and "".join(segments) == "abxy" and len(segments) == 4


def test_a_stop_string_completed_by_the_last_allowed_token_is_a_stop(tokenizer):
    segments, finish = run(tokenizer, "abxyz", max_tokens=5, stop=("xyz",))
    assert finish == "stop" and "".join(segments) == "ab"


def test_an_id_past_the_tokenizer_has_no_text(tokenizer):
    emitter = Emitter(tokenizer, -1)
    assert emitter.take(len(tokenizer) + 5) is None
    assert emitter.segments == [""]


def test_a_special_token_with_letters_outside_the_byte_alphabet(tmp_path):
    """mlx-lm's BPE detokenizer raises KeyError when it finalizes one."""
    save_byte_tokenizer(tmp_path)
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
    from transformers import AutoTokenizer

    plain = AutoTokenizer.from_pretrained(str(tmp_path))
    plain.add_special_tokens({"additional_special_tokens": ["<｜end｜>"]})
    wrapped = TokenizerWrapper(plain, BPEStreamingDetokenizer)
    emitter = Emitter(wrapped, 2)
    emitter.take(plain.convert_tokens_to_ids("<｜end｜>"))
    assert emitter.take(0) == "stop"


def test_a_template_with_bos_gives_exactly_one(tokenizer, tmp_path):
    """Case: a template that writes BOS, and a tokenizer that adds it as well."""
    from tokenizers import processors
    from transformers import AutoTokenizer

    save_byte_tokenizer(tmp_path)
    plain = AutoTokenizer.from_pretrained(str(tmp_path))
    plain.bos_token = "<|end|>"
    plain._tokenizer.post_processor = processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 0)]
    )
    plain.chat_template = "<|end|>{% for m in messages %}{{ m['content'] }}{% endfor %}"
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    wrapped = TokenizerWrapper(plain)
    assert encode_chat(wrapped, [{"role": "user", "content": "hi"}]).count(0) == 1
    assert encode_prompt(wrapped, "<|end|>hi").count(0) == 1
    assert encode_prompt(wrapped, "hi").count(0) == 1


def test_no_chat_template_is_said(tokenizer, tmp_path):
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from transformers import AutoTokenizer

    save_byte_tokenizer(tmp_path)
    plain = AutoTokenizer.from_pretrained(str(tmp_path))
    plain.chat_template = None
    with pytest.raises(UnsupportedError, match="no chat template"):
        encode_chat(TokenizerWrapper(plain), [{"role": "user", "content": "hi"}])
