"""What a line of an unknown log states: names with numbers, which of them is a loss, and a pattern for lines like it.

Pure functions of text, for a format that nobody has described yet.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

NUMBER = r"[-+]?(?:\d{1,3}(?:[,_]\d{3})++(?![\d,_])(?:\.\d++)?+|\d++(?:\.\d*+)?+|\.\d++)(?:[eEf][-+]?\d++)?+"
_COMMA = re.compile(r"\d++,\d")
_PAIR = re.compile(  # possessive and bounded: a line of any form takes a millisecond
    r"(?<![\w])(?P<name>[A-Za-z][\w./@^-]*+(?: [A-Za-z][\w./@^-]*+){0,3}"
    r"(?: [(\[][A-Za-z][\w -]{0,24}+[)\]](?=\s?[:=]))?)"
    r"(?P<between>[\"']?\s{0,40}+(?:[:=|：]|is|=>)?\s{0,12}(?:(?:tensor|Array|(?:np|numpy|jnp)\.\w{1,16}+)\(|\[(?=\d*\.)|[\"'])?)"
    rf"(?P<number>{NUMBER}|[-+]?(?:nan|inf))(?P<unit>\s?(?:dB|nats?|bits?|pts?|pp|px|mm|cm|m?eV)(?!\w))?(?!\w|\s?%\|)"
)
_NUMBERED_NAME = re.compile(rf"\s?[:=：]\s{{0,12}}(?P<number>{NUMBER})(?![\w/:])")
"""What stands behind the number of a name: ``val_loss 1: 0.81``."""
_PERCENT = re.compile(r"\s?%")
_COUNT = re.compile(r"(?<![\w.])(?P<number>\d++) (?P<name>samples|sequences|steps|iterations|updates|epochs)\b")
_OPENED = re.compile(  # "Epoch [1/4]", "Epoch: [0][10/196]", "Epoch(val) [1][9/9]"; of an eval's batches nothing
    r"(?i)(?<![\w.])(?P<name>(?:epoch|step|iter(?:ation)?)(?![a-z])(?<!iter(?=\((?:val|test))))"
    r"(?:\((?:train|val|valid|test)\))?\s{0,8}:?\s{0,8}[\[(]\s{0,8}(?P<number>\d++)(?=\s?[/\]),])"
)
_FORMS = {
    "samples": ("samples", "consumed samples", "sample", "sequences", "tokens", "consumed tokens", "tokens seen"),
    "step": ("timestep", "timesteps", "episode", "episodes", "step", "steps", "iter", "iters", "iteration",
             "iterations", "it", "update", "updates"),
    "epoch": ("epoch", "epochs"),
}  # fmt: skip
_PROGRESS = {word: group for group, words in _FORMS.items() for word in words}
_SETTINGS = frozenset(("every", "per", "max", "warmup", "accumulation", "decay", "interval"))
"""Words of a number of steps that is set and counts none: ``log_every_n_steps=50``, ``max steps: 600``."""
ORDER = ("samples", "step", "epoch")
"""Groups that say how far a run is, the finest first."""

EVAL_WORDS = frozenset(("eval", "evaluation", "val", "valid", "validation", "test", "dev", "heldout", "validate"))
_TRAIN_WORDS = frozenset(("train", "training", "tr", "smoothed", "lm"))
_LOSSES = {"loss": 7, "nll": 5, "perplexity": 5, "ppl": 5, "bpb": 5, "bpc": 5, "xent": 5, "rmse": 5, "logloss": 5}
_LOSSES |= {"mlogloss": 5, "nloglik": 5, "deviance": 5, "rmsle": 5, "merror": 3, "mape": 3, "smape": 3, "fid": 3}
_LOSSES |= {"lpips": 3, "eer": 3, "mse": 3, "mae": 3, "ce": 3, "mlm": 3, "wer": 3, "cer": 3}
_SHARES = {"accuracy": 3, "acc": 3, "f1": 3, "bleu": 3, "rouge": 3, "auc": 3, "miou": 3, "dice": 3, "reward": 8}
_SHARES |= {"map": 3, "ap": 3, "ndcg": 3, "psnr": 3, "ssim": 3, "mrr": 3, "mcc": 3, "kappa": 3, "spearman": 3}
_SHARES |= {"pearson": 3, "precision": 3, "recall": 3, "iou": 3, "aucpr": 3, "auprc": 3, "auroc": 3, "chrf": 3}
_SHARES |= {"rouge1": 3, "rouge2": 3, "rougel": 3, "r2": 3, "rew": 8, "return": 8, "returns": 8}
"""Words of measures that rise. Beside a reward, a training loss says nothing of how good a policy is."""
_OF_EVALS = {"error": 3, "err": 3, "l1": 2, "l2": 2, "huber": 2, "quantile": 3, "score": 3, "em": 3}
"""Words of measures where an eval's word stands beside them; alone they say too little. ``score`` and ``em`` rise."""
_MEASURES = _LOSSES | _SHARES
EVAL_SCORE = 8
"""A measure whose name scores more says by itself that it is an eval's."""
_BEST = frozenset(("best", "lowest", "min", "previous", "target"))
_SPREADS = frozenset(("std", "stderr", "var"))
_CHANGES = frozenset(("improved", "improvement", "decreased", "increased", "reduced", "dropped", "delta", "change"))
"""A number behind these is how far a measure moved, unless ``to`` stands there."""
_BARE = 9
"""Score of ``val 2.31``: below every measure of an eval that has a name, above every measure of training."""

_CAPITALS = re.compile(r"mAP|mIoU|(?<=[a-z])(?=[A-Z])")
"""Where a name's next word begins; two measures are one word for all their capitals."""

_SQUARED = re.compile(r"(?i)(?<![a-z])r(?:\^2|²|_squared|-squared|[- ]?sq(?![a-z]))")

_SPLIT = re.compile(  # a word that says what the numbers behind it are of; not of a path, a file or a longer name
    rf"(?i)(?<![\w/.-])({'|'.join(sorted((EVAL_WORDS | _TRAIN_WORDS) - {'lm', 'tr', 'smoothed'}))})"
    r"(?:(?-i:(?=[A-Z][a-z]))|(?![a-z/.]|-(?!set\b)|_[a-z]))"
)
_COMPOSER = re.compile(r"(?<!\S)\[(?P<name>(?:epoch|batch)=)(?P<number>\d++)(?=[/\]])")
_BRACKETED = re.compile(r"(?<!\S)\[(?P<number>\d++)\](?=[:\s])")
_NUMBERED = re.compile(r"\s{0,8}(?P<number>\d++):(?=\s)")


_BELOW, _HEADING_LENGTH, _RULES = 6, 80, ":=*#~-─━"


@dataclass(frozen=True, slots=True)
class NamedNumber:
    """A name and its number. begin, end: of the whole; at: where the number begins; tail: what stands behind it.

    grouped: thousands are set apart in it, or in another of its name.
    split, split_at: the word in front that says that it is an eval's, where its name does not: ``valid | loss 2.3``.
    heading: the same word where it stands in a heading above the line.
    """

    name: str
    number: str
    begin: int
    at: int
    end: int
    tail: str = ""
    grouped: bool = False
    split: str = ""
    split_at: int = 0
    heading: str = ""

    @property
    def words(self) -> list[str]:
        """The name's words in small letters, ``val/avg_loss`` as val, avg and loss."""
        name = _SQUARED.sub("R2", f"{self.heading} {self.split} {self.name}")
        return re.findall(r"[a-z][a-z0-9]*|\d+", _CAPITALS.sub(lambda m: m[0].lower() or " ", name).lower())

    @property
    def progress(self) -> str:
        """samples, step or epoch where the name says how far the run is, else ""."""
        words = self.words
        if _SETTINGS & {*words}:
            return ""
        return _PROGRESS.get(" ".join(words[-2:])) or _PROGRESS.get(words[-1] if words else "", "")

    @property
    def score(self) -> int:
        """How much the name looks like an eval's: 0 for what is no measure of quality."""
        words = self.words
        if len(words) == 1 and words[0] in EVAL_WORDS:
            return _BARE if "." in self.number else 0
        return name_score(words)

    @property
    def bracketed(self) -> bool:
        """Whether it is a number without a name, in brackets or before a colon, which may count anything."""
        return self.tail in ("]", ":")

    @property
    def trains(self) -> bool:
        """Whether the name is of a training loss."""
        known = {*self.words}
        return "loss" in known and not known & (EVAL_WORDS | _BEST)

    @property
    def falls(self) -> bool:
        """Whether less of it is better."""
        known = {*self.words}
        return not ({*_SHARES, "score", "em"} & known) or bool({*_LOSSES, "error", "err"} & known)


_WORDS = {*_MEASURES, *_OF_EVALS, *EVAL_WORDS, *(form.split()[-1] for form in _PROGRESS), "entropy"}
_LONG = tuple(sorted(word for word in _WORDS if len(word) > 2))
_SHORT = re.compile(r"(?<![A-Za-z])(?i:it|ap|ce|f1|r2|r²|r\^2|l1|l2|em)(?![a-z])|(?<=[a-z])(?:AP|CE|F1|R2)|\[batch=")


def _matters(line: str) -> bool:
    """Whether a line holds any word that names a measure or says how far a run is."""
    small = line.lower()
    return any(word in small for word in _LONG) or _SHORT.search(line) is not None


def name_score(parts: list[str]) -> int:
    """How much a name of these parts looks like an eval's: 0 for what measures nothing, 15 for ``val_loss``."""
    known = {*parts} | ({"xent"} if {"cross", "entropy"} <= {*parts} else set())
    kind = max((_MEASURES.get(word, 0) for word in known), default=0)
    if not kind and known & EVAL_WORDS:
        kind = max((_OF_EVALS.get(word, 0) for word in known), default=0)
    if not kind or known & _SPREADS or (known & _CHANGES and "to" not in known):
        return 0
    named = 4 * bool(EVAL_WORDS & known) - 2 * bool(_TRAIN_WORDS & known) - 6 * bool(_BEST & known)
    return max(0, kind + 2 * named)


def of_test_set(parts: Collection[str]) -> bool:
    """Whether a name of these parts is a test set's, which is looked at where no validation set is."""
    return {*parts} & EVAL_WORDS == {"test"}


def other_sets(name: str, names: Iterable[str]) -> tuple[str, ...]:
    """Those of ``names`` that state the same measure as ``name`` of other sets: ``val loss code`` of ``val loss wiki``.

    Names are words with blanks between. One without a word of its own, such as ``val loss``, is a whole.
    """
    said = EVAL_WORDS | _TRAIN_WORDS | _MEASURES.keys()
    own, known = {*name.split()} - said, {*name.split()} & said
    return tuple(n for n in names if own and ({*n.split()} & said) == known and {*n.split()} - said - own)


def pairs(line: str) -> Iterator[NamedNumber]:
    """Every name with a number in a line, in order; of a name's words only those from the first one that matters.

    None of a line without any word that matters.
    """
    if not _matters(line):
        return
    before = line  # with the measures that were seen blanked out, whose names say nothing of others
    for match in _PAIR.finditer(line):
        begin = match.start("name") + _idle(match["name"])
        name = line[begin : match.end("name")]
        unit = match["unit"] or ""
        pair = NamedNumber(name, match["number"], begin, match.start("number"), match.end("number") + len(unit), unit)
        if pair.score and pair.number.isdigit() and (value := _NUMBERED_NAME.match(line, pair.end)):
            name = line[begin : pair.end]
            pair = NamedNumber(name, value["number"], begin, value.start("number"), value.end())
        if _misread(line, pair):
            continue
        if (pair.score or _OF_EVALS.keys() & {*pair.words}) and not pair.progress:
            pair = _of_split(before, pair)
            before = before[:begin] + " " * (pair.end - begin) + before[pair.end :]
        yield pair


def _misread(line: str, pair: NamedNumber) -> bool:
    """Whether the number is not what it seems: it has a decimal comma, or says in percent how far an epoch is."""
    if _COMMA.match(line, pair.at) and ("," not in pair.number or not (pair.progress or "." in pair.number)):
        return True
    return _PERCENT.match(line, pair.end) is not None and not name_score(pair.words)


def _of_split(before: str, pair: NamedNumber) -> NamedNumber:
    """The measure with the word in front that says that it is an eval's, where its own name does not say."""
    splits = [*_SPLIT.finditer(before, 0, pair.begin)]
    if not splits or splits[-1][0].lower() not in EVAL_WORDS or {*pair.words} & (EVAL_WORDS | _TRAIN_WORDS - {"lm"}):
        return pair
    return replace(pair, split=splits[-1][0], split_at=splits[-1].start())


def headed(lines: Sequence[str], at: int, pair: NamedNumber) -> NamedNumber:
    """The measure with the word of the heading above its line that says that it is an eval's, if there is one.

    Up to ``_BELOW`` lines below a heading are of it, as long as none of them says something of training.
    """
    if not pair.score or {*pair.words} & (EVAL_WORDS | _TRAIN_WORDS):
        return pair
    for row in range(at - 1, max(-1, at - 1 - _BELOW), -1):
        if _is_heading(lines[row]):
            word = next((split[0] for line in lines[row : at + 1] for split in _SPLIT.finditer(line)), "")
            between = [split[0].lower() for line in lines[row : at + 1] for split in _SPLIT.finditer(line)]
            return replace(pair, heading=word) if word and EVAL_WORDS.issuperset(between) else pair
    return pair


def _is_heading(line: str) -> bool:
    """Whether a line says what the lines below it are of: ``=== evaluation ===``, ``Test error:``."""
    text = line.strip()
    marked = text[-1:] in _RULES or text[:2] in {2 * mark for mark in _RULES[1:]}
    return marked and len(text) < _HEADING_LENGTH and any(map(str.isalpha, text))


_MATTER = EVAL_WORDS | _TRAIN_WORDS | _MEASURES.keys() | _BEST | _PROGRESS.keys() | _SETTINGS | {"global"}


def _idle(name: str) -> int:
    """Characters of a name before the word with which it begins to matter: ``done with val loss`` -> 10."""
    for word in re.finditer(r"\S+", name):
        known = {*re.findall(r"[a-z]+", word[0].lower())}
        if known & _MATTER:
            return word.start()
    return 0


def _counted(line: str) -> Iterator[NamedNumber]:
    """What is counted behind its number: ``after 1024 samples``."""
    for match in _COUNT.finditer(line):
        begin, end = match.span()
        yield NamedNumber(match["name"], match["number"], begin, begin, end, line[match.end("number") : end])


def _opened(line: str) -> Iterator[NamedNumber]:
    """What is counted within brackets behind its name: ``Epoch [1/4]``."""
    for match in _OPENED.finditer(line):
        yield NamedNumber(match["name"], match["number"], match.start(), match.start("number"), match.end("number"))


def _batch(line: str) -> Iterator[NamedNumber]:
    """What Composer's blocks begin with: ``[batch=10/80]``, or the epoch where batches begin anew in each."""
    for match in _COMPOSER.finditer(line):
        name = "epoch" if match["name"].startswith("epoch") else "step"
        yield NamedNumber(name, match["number"], match.start(), match.start("number"), match.end("number"))


def _nameless(line: str) -> Iterator[NamedNumber]:
    """A number in brackets, or before a colon where the line begins.

    It counts steps where nothing else in the line says how far the run is.
    """
    for match in _BRACKETED.finditer(line):
        yield NamedNumber("step", match["number"], match.start(), match.start("number"), match.end(), "]")
    for match in filter(None, (_NUMBERED.match(line),)):
        begin, end = match.span("number")
        yield NamedNumber("step", match["number"], begin, begin, end + 1, ":")


def losses(line: str) -> list[NamedNumber]:
    """What measures quality in a line, most like an eval first."""
    return sorted((p for p in pairs(line) if p.score and not p.progress), key=lambda p: -p.score)


def positions(line: str) -> list[NamedNumber]:
    """What says how far the run is, the finest first."""
    numbers = [
        p
        for p in (*pairs(line), *_counted(line), *_opened(line), *_batch(line))
        if p.progress and p.number[:1].isdigit()
    ]
    return sorted(numbers, key=lambda p: ORDER.index(p.progress)) or [*_nameless(line)]


def pattern(
    line: str, loss: NamedNumber | None, progress: NamedNumber | None, between: str = ".*?", *, wide: bool = False
) -> str:
    """A pattern for lines like this one, with the groups ``loss`` and samples, step or epoch as far as they are given.

    What stands between the two may differ from line to line (``between``), and so may the lengths of numbers and of
    spaces. wide: also where nothing but signs stands between them in this line.
    """
    parts = [(p, group) for p, group in ((loss, "loss"), (progress, progress.progress if progress else "")) if p]
    pieces = [(p.begin, p.end, _piece(line, p, group)) for p, group in parts]
    if loss is not None and loss.split and not any(begin <= loss.split_at < end for begin, end, _ in pieces):
        end = loss.split_at + len(loss.split)
        pieces.append((loss.split_at, end, rf"(?<![a-zA-Z]){loss.split}(?![a-z])"))
    pieces.sort()
    text, last = "", None
    for begin, end, piece in pieces:
        gap = "" if last is None else line[last:begin]
        far = re.search(r"\w", gap) or len(gap) > 4 or (wide and len(gap) > 1)
        text += between if far else _literal(gap)
        bare = last is None or (loss is not None and (loss.split or (text.endswith(between) and loss.name.isalpha())))
        alone = loss is not None and begin == loss.begin and bare
        text += _guard(line, begin) + piece if alone or loss is None else piece
        last = end
    return text


def _piece(line: str, pair: NamedNumber, group: str) -> str:
    """A pair as a pattern with its number as a group."""
    return _literal(line[pair.begin : pair.at]) + f"(?P<{group}>{_field(group, pair)})" + _literal(pair.tail)


def _guard(line: str, begin: int) -> str:
    """What keeps ``loss`` from matching within ``train_loss``, where nothing of its own name stands before it."""
    return r"(?<![\w/])" if begin and not re.match(r"[\w/]", line[begin - 1]) else ""


def _literal(text: str) -> str:
    """The text as a pattern in which spaces may differ in length, and need not be there after ``:`` and ``=``."""
    escaped = re.sub(r"([^\w\s/:=\"',@<>%-])", r"\\\1", text)
    return re.sub(r"\s+", r"\\s+", re.sub(r"([:=])\s+$", r"\1\\s*", escaped))


def _field(group: str, pair: NamedNumber) -> str:
    if group != "loss" and "_" in pair.number:
        return r"[\d_]+"
    if pair.grouped or "," in pair.number:
        return r"(?:\d{1,3}(?:,\d{3})*(?:\.\d+)?|nan|inf)" if group == "loss" else r"[\d,]+"
    if group == "loss":
        return NUMBER.replace("++", "+").replace("?+", "?").replace("*+", "*") if pair.tail else r"[-+.\w]+"
    return r"\d+" if pair.number.isdigit() else r"[\d.eE+-]+"


# Numbers as a German, French or Brazilian locale prints them: ``1.234,5`` for 1,234.5. Pure functions of text.


_NUMBER = re.compile(r"(?<![\w.,])(?:\d{1,3}(?:\.\d{3})++(?:,\d++)?+|\d++,\d++)(?![.,]?\d)")
_SWAPPED = str.maketrans(",.", ".,")
_NO_THOUSANDS = re.compile(
    r"(?<!\d)(?<!\d\d:)\d++,\d++(?<![1-9],\d\d\d)(?<![1-9]\d,\d\d\d)(?<![1-9]\d\d,\d\d\d)(?![.,]?\d)"
)
"""A comma that sets no thousands apart: ``0,925``, ``2,5``, but not ``1,200``."""


def with_points(text: str) -> str:
    """The text, as long as it was, with a point in numbers that have a decimal comma; their thousands have commas."""
    return _NUMBER.sub(lambda number: number[0].translate(_SWAPPED), text) if "," in text or "." in text else text


def in_use(lines: Sequence[str]) -> bool:
    """Whether measures stand there with a decimal comma for certain, by their names or in a table with semicolons."""
    return any(_in_use(line) for line in lines if _NO_THOUSANDS.search(line))


def _in_use(line: str) -> bool:
    if ";" in line and any(_NO_THOUSANDS.fullmatch(cell.strip()) for cell in line.split(";")):
        return True
    return any(pair.score and _NO_THOUSANDS.match(line, pair.at) for pair in pairs(with_points(line)))
