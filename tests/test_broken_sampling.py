"""Each rule of sampling, log probabilities and text, broken one at a time in a copy: some test must turn red."""

# ruff: noqa: E501

from __future__ import annotations

from pathlib import Path

import pytest
from test_broken_rules import break_rule, copy, red_test  # noqa: F401

pytestmark = pytest.mark.long

RULES: dict[str, tuple[str, str, str]] = {  # what is broken: module, the line as it is, the line as it must not be
    # the draw
    "greedy rows are not divided by 0": ("sampler", "temperature.where(temperature >= SAMPLING_EPS, 1.0)", "temperature"),
    "greedy rows take the largest": ("sampler", "torch.where(meta.temperature < SAMPLING_EPS, greedy, drawn)", "drawn"),
    "min-p comes before top-k": ("sampler", "        if meta.min_p is not None:\n            logits = apply_min_p(logits, meta.min_p)\n", ""),
    "min-p is relative": ("sampler", "probs.amax(dim=-1, keepdim=True) * min_p", "min_p"),
    "the k-th stays": ("sampler", "masked_fill_(logits < kth_largest", "masked_fill_(logits <= kth_largest"),
    "top-p keeps the first": ("sampler", "    left_out[:, -1] = False\n", ""),
    "top-p counts from below": ("sampler", "mass_up_to_here <= 1 - top_p", "mass_up_to_here < 1 - top_p - 0.05"),
    "top-p's ties are decided": ("sampler", "token_ids = likeliest(logits, candidates).flip(-1)", "token_ids = logits.topk(candidates, dim=-1).indices.flip(-1)"),
    "a race is won by p / q": ("sampler", "largest(probs / q)", "largest(probs * q)"),
    "a seed counts": ("sampler", "        q[row].exponential_(generator=generator)\n", "        pass\n"),
    "seeds differ": ("sampler", "manual_seed(params.seed)", "manual_seed(0)"),
    "raw is raw": ("sampler", 'raw if self.logprobs_mode.startswith("raw") else drawn_from', "drawn_from"),
    # what may be said
    "allowed ids": ("logits_processors", "logits[rows] = logits[rows].masked_fill(forbidden, -torch.inf)", "pass"),
    "forbidden is forbidden": ("logits_processors", "logits[pairs] = -torch.inf", "logits[pairs] = -1.0"),
    "the bias adds": ("logits_processors", "accumulate=True", "accumulate=False"),
    "penalties come after the bias": ("logits_processors", "    if todo.bias is not None:\n        add_bias(logits, *todo.bias)\n    if todo.penalties is not None:\n        apply_penalties(logits, todo.penalties)\n", "    if todo.penalties is not None:\n        apply_penalties(logits, todo.penalties)\n    if todo.bias is not None:\n        add_bias(logits, *todo.bias)\n"),
    "negative logits are multiplied": ("logits_processors", "torch.where(some > 0, 1.0 / factor, factor)", "1.0 / factor"),
    "frequency counts": ("logits_processors", "p.frequency * p.counts", "p.frequency * (p.counts > 0)"),
    "presence does not count": ("logits_processors", "p.presence * (p.counts > 0)", "p.presence * p.counts"),
    "presence is of the answer": ("logits_processors", "p.presence * (p.counts > 0)", "p.presence * p.seen"),
    "a bad word begins in the answer": ("logits_processors", "return long_enough & ", "return "),
    "a bad word is compared at its end": ("logits_processors", "known[:, None] - longest + np.arange", "known[:, None] - longest - 1 + np.arange"),
    # at the door
    "a bias is finite": ("sampling_checks", "-1e30, 1e30", "-3.4e38, 3.4e38"),
    "no answer without a seed": ("sampling_checks", "p.seed < -1 < p.seed + p.n", "False"),
    "a tiny temperature is not greedy": ("sampling_checks", "        p.temperature = MIN_TEMPERATURE\n", "        pass\n"),
    "integers fit a message": ("sampling_checks", "2**63 - 1  # what", "1e300  # what"),
    "strings are plain": ("sampling_checks", "return [MEMBERS[name].kind(member) for member in value]", "return list(value)"),
    "something is left on the way": ("sampling_checks", "{word[-1] for word in p.bad_words_token_ids or [] if allowed.issuperset(word)}", "{w[0] for w in p.bad_words_token_ids or [] if len(w) == 1}"),
    "fields that were set later": ("sampling_checks", "    p = p.clone()\n", ""),
    "False is not 0": ("sampling_params", "type(value) is not type(nothing) or ", ""),
    # the columns
    "a generator moves with its row": ("sampling_metadata", "            self.generators[dst] = self.generators.pop(src)\n", "            self.generators[dst] = self.generators[src]\n"),
    "wishes move with their row": ("sampling_metadata", "            self.naming[dst] = self.naming.pop(src)\n", "            self.naming.pop(src)\n"),
    "a row that has gone is forgotten": ("sampling_metadata", "        self.naming.pop(row, None)\n", ""),
    "another batch is another batch": ("sampling_metadata", " or not np.array_equal(self._fixed.rows, rows)", ""),
    "min_tokens ends": ("sampling_metadata", '+ p.min_tokens)', "+ p.min_tokens + 1)"),
    "ends outside the vocabulary": ("sampling_metadata", " for t in p.all_stop_token_ids if t in known", " for t in p.all_stop_token_ids"),
    "the prompt is no answer": ("sampling_metadata", "counts = count_tokens(ids, start, stop,", "counts = count_tokens(ids, np.zeros_like(start), stop,"),
    "the prompt counts for repetition": ("sampling_metadata", "(count_tokens(ids, np.zeros_like(start), start, self.vocab_size, self.device) + counts) > 0", "counts > 0"),
    # log probabilities
    "ties: the lower id": ("logprobs", "((in_order << 32) - ids)", "((in_order << 32) + ids)"),
    "negative floats in order": ("logprobs", "torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)", "bits"),
    "the token itself comes first": ("logprobs", "torch.cat([token_ids.unsqueeze(1), likeliest(values, n)], dim=1)", "likeliest(values, n + 1)"),
    "rank 1 is the likeliest": ("logprobs", "(values >= chosen[:, :1])", "(values > chosen[:, :1])"),
    "each gets its own share": ("logprobs", "t[:, : n + 1]", "t[:, :1]"),
    "position i is asked about token i + 1": ("logprobs", "token_ids[1:]", "token_ids[:-1]"),
    "the last position asks nobody": ("logprobs", "min(start + count, len(self.targets))", "min(start + count, len(self.targets) - 1)"),
    "prompts are read in order": ("model_runner", "asked.add(computed + i,", "asked.add(i,"),
    "a prompt is handed over when it is complete": ("model_runner", "if computed + count > len(asked.targets):", "if True:"),
    "prompt_logprobs bypass the cache": ("sampling_params", "            self.skip_reading_prefix_cache = True\n", "            pass\n"),
    "the caller's share travels": ("update", "sampled.logprobs.get(request_id)", "None"),
    "a duplicate keeps its place": ("logprobs_processor", "ranks = [rank, *range(1, len(ids))]", "ranks = [rank, *range(2, len(ids) + 1)]"),
    "the sum is of the answer": ("logprobs_processor", "self.cumulative_logprob += ", "self.cumulative_logprob = "),
    # several answers
    "children differ": ("parallel_sampling", "params.seed + index", "params.seed"),
    "children are single": ("parallel_sampling", "child.n, child.seed = 1,", "child.n, child.seed = params.n,"),
    "answers come together": ("parallel_sampling", "return [] if self.unfinished else", "return"),
    "a parent goes with its last child": ("output_processor", "self.parents.pop(state.parent.request.request_id, None)", "pass"),
    # text
    "half a character is not shown": ("detokenizer", 'return self.stream.step(self.tokenizer, token_id) or ""\n        except', "return self.tokenizer.decode([token_id])\n        except"),
    "the stream knows the prompt": ("detokenizer", "DecodeStream(ids=tail[:n], ", "DecodeStream("),
    "skipped tokens are no text": ("detokenizer", "while len(tail) < len(prompt_token_ids) and not self._whole(tail):", "while False:"),
    "the prompt's bytes are not the answer's": ("detokenizer", 'self.unfinished = "�" * ', 'self.unfinished = "" * '),
    "an answer completes the prompt's character": ("detokenizer", "            self._decode(token_id)\n", "            pass\n"),
    "text is held back": ("detokenizer", "0 if finished else self.held_back", "0"),
    "a stop string may begin in old text": ("detokenizer", "len(text) - new_chars - len(stop_string) + 1", "len(text) - new_chars"),
    "a stop string cuts": ("detokenizer", "        self.output_text = self.output_text[:length]\n", ""),
    "min_tokens for stop strings": ("detokenizer", "            if len(self.token_ids) <= self.min_tokens:\n", "            if False:\n"),
    "a stop token has no text": ("detokenizer", "hidden = stop_terminated and", "hidden = False and"),
    "a stop string wins over length": ("output_processor", "finish_reason, stop_reason = FinishReason.STOP, stop_string", "finish_reason, stop_reason = finish_reason or FinishReason.STOP, stop_string"),
    "the core is told of a stop string": ("output_processor", "                if output.finish_reason is None:\n                    reqs_to_abort", "                if False:\n                    reqs_to_abort"),
}  # fmt: skip
TESTS = [
    "nbs/02b_parameters.ipynb", "tests/test_same_sampling.py", "tests/test_sampling_properties.py", "nbs/13c_columns.ipynb", "nbs/13d_logprobs.ipynb",
    "nbs/15b_answers.ipynb", "nbs/13b_processors.ipynb", "nbs/13_sampling.ipynb", "nbs/15_output.ipynb",
]  # fmt: skip


def test_nothing_is_noticed_where_nothing_is_broken(copy: Path) -> None:  # noqa: F811
    assert red_test(copy, TESTS) is None


@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_is_noticed(copy: Path, rule: str) -> None:  # noqa: F811
    break_rule(copy, rule, RULES[rule], TESTS)
