"""Names and numbers in a log line, by one rule for the lines of all trainers. Pure functions of text.

A token is a name, a separator and a number. Its name includes words for its data set: a preceding word on the line, the
heading above it, or its table column.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from lora_tune.logs.run import as_number

NUMBER = r"[-+]?(?:\d{1,3}(?:[,_]\d{3})++(?![\d_]|,\d)(?:\.\d++)?+|\d++(?:\.\d*+)?+|\.\d++)(?:[eEf][-+]?\d++)?+"
_L = r"[^\W\d_]"
_PAIR = re.compile(  # possessive and bounded: any line takes at most a millisecond
    rf"(?<!\w)(?P<name>{_L}[\w./@^-]*+(?: {_L}[\w./@^-]*+){{0,3}}(?: ?[(\[]{_L}[\w -]{{0,24}}+[)\]](?=\s?[:=]))?)"
    r"(?P<between>[\"']?\s{0,40}+(?:[:=|│┃：#]|is|=>)?\s{0,24}(?:(?:tensor|Array|(?:np|numpy|jnp)\.\w{1,16}+)\(|\[(?=\d*\.)|[\"'])?)"
    rf"(?P<number>{NUMBER}|[-+]?(?:nan|inf))(?:(?P<of>/ ?\d++)|\s?(?:dB|nats?|bits?|pts?|pp|px|mm|cm|m?eV)(?!\w))?"
    r"(?![\w/]|\s?%\|)"
)
_SECOND = re.compile(rf"\s?[:=：]\s{{0,12}}(?P<number>{NUMBER})(?![\w/:])")
"""Number after a name that ends in a number: ``val_loss 1: 0.81``."""
MEAN = re.compile(rf"\s{{1,8}}\(\s{{0,8}}(?!\+)(?P<number>{NUMBER})\s{{0,8}}\)")
"""Running mean after a batch's value: ``Loss 2.1 (2.3)``. One of another sign is a change."""
_COUNT = re.compile(
    r"(?<![\w./])(?P<number>\d++)(?: (?P<name>samples|sequences|steps|iterations|updates|epochs)|epoch)\b"
)
_SHARE = re.compile(r"(?P<number>\d++)\s?/\s?(?P<of>\d++)(?: = [\d.]++%)? (?P<name>correct)\b")
_OPENED = (  # "Epoch [1/4]", "Epoch: [0][10/196]", "[batch=10/80]", "Train: 0 [1/9", "1/2  2.44G": never of evals
    re.compile(
        r"(?i)(?<![\w.])(?P<name>(?:epoch|step|iter(?:ation)?)(?![a-z])(?<!iter(?=\((?:val|test))))"
        r"(?:\((?:train|val|valid|test)\))?\s{0,8}:?\s{0,8}[\[(]\s{0,8}(?P<number>\d++)(?=\s?[/\]),])"
    ),
    re.compile(r"(?<!\S)\[(?P<name>epoch|batch)=(?P<number>\d++)(?=[/\]])"),
    re.compile(r"(?i)^\W{0,8}train(?P<name>):?\s+(?P<number>\d+)\s+\["),
    re.compile(r"^\s*(?P<number>\d+)(?P<name>)/\d+\s+[\d.]+[GM]\s"),
)
_NAMELESS = (  # "[12] ", "[12/90] " and "12: ", if nothing else counts; torchtune's "1|12|Loss:"
    re.compile(r"(?<!\S)\[(?P<number>\d++)\](?=[:\s])"),
    re.compile(r"^\s*\[(?P<number>\d++)/\d+\]\s"),
    re.compile(r"^\s{0,8}(?P<number>\d++):(?=\s)"),
    re.compile(r"^.*(?<!\d)\d+\|(?P<number>\d++)\|(?=[A-Za-z])"),
    re.compile(r"^\s*(?P<number>\d++)\s*$"),  # the only text on its line
)
_OF_AN_EPOCH = re.compile(r"\d\]\s?\[\s{0,8}\d+/\d+\]")
"""``Epoch: [0][ 10/196]``: a batch of training."""
_BATCH = re.compile(r"\[[^\[\]]*?(?<!\d)(?P<at>\d++)/(?P<of>\d++)\]")

_UNITS = {
    "samples": ("samples", "sample", "sequences", "tokens", "seen"),
    "step": ("timestep", "timesteps", "episode", "episodes", "step", "steps", "iter", "iters", "iteration",
             "iterations", "it", "update", "updates", "batch", "fold", "round", "rounds"),
    "epoch": ("epoch", "epochs", "ep"),
}  # fmt: skip
_PROGRESS = {term: group for group, terms in _UNITS.items() for term in terms}
_SETTINGS = frozenset(
    ["every", "per", "max", "warmup", "accumulation", "decay", "interval", "early", "patience", "time"]
)
"""Words of a configured number of steps, which is no counter: ``log_every_n_steps=50``, ``max steps: 600``."""
ORDER = ("samples", "step", "epoch")
"""Units of progress, finest first."""

EVAL_NAMES = frozenset(
    ("eval", "evaluation", "val", "va", "valid", "validation", "test", "dev", "heldout", "validate", "validating", "cv")
)
_TRAIN_NAMES = frozenset(("train", "training", "tr", "smoothed", "lm", "learn"))
_LOSSES = {"loss": 7, "nll": 5, "perplexity": 5, "ppl": 5, "bpb": 5, "bpc": 5, "xent": 5, "rmse": 5, "logloss": 5}
_LOSSES |= {"mlogloss": 5, "nloglik": 5, "deviance": 5, "rmsle": 5, "merror": 3, "mape": 3, "smape": 3, "fid": 3}
_LOSSES |= {"cost": 5}
_LOSSES |= {"lpips": 3, "eer": 3, "mse": 3, "mae": 3, "ce": 3, "mlm": 3, "wer": 3, "cer": 3}
_SHARES = {"accuracy": 3, "acc": 3, "accu": 3, "f1": 3, "bleu": 3, "rouge": 3, "auc": 3, "dice": 3, "reward": 8}
_SHARES |= {"ndcg": 3, "psnr": 3, "ssim": 3, "mrr": 3, "mcc": 3, "kappa": 3, "spearman": 3, "correct": 3}
_SHARES |= {"pearson": 3, "precision": 3, "recall": 3, "iou": 3, "aucpr": 3, "auprc": 3, "auroc": 3, "chrf": 3}
_SHARES |= {"rougel": 3, "r2": 3, "rew": 8, "return": 8, "returns": 8, "map": 3, "ap": 3, "miou": 3, "top1": 3}
"""Words of maximised metrics. With a reward, a training loss does not measure a policy's quality."""
_OF_EVALS = {"error": 3, "err": 3, "l1": 2, "l2": 2, "huber": 2, "quantile": 3, "score": 3, "em": 3}
"""Words of metrics only together with an eval's word; alone they are ambiguous. ``score`` and ``em`` are maximised."""
_MEASURES = _LOSSES | _SHARES
EVAL_SCORE = 8
"""Metrics with a higher name score are evals by name alone."""
_BARE = 9
"""Score of ``val 2.31``: below every named eval metric, above every training metric."""
_BEST = frozenset(("best", "lowest", "highest", "min", "max", "minimum", "maximum", "previous", "target"))
_SPREADS = frozenset(("std", "stderr", "var"))
_CHANGES = frozenset(("improved", "improvement", "decreased", "increased", "reduced", "dropped", "delta", "change"))
"""A number after these is the change of a metric, unless ``to`` is among them."""

_PREFIXED = re.compile(
    r"(?<![a-z])(?:(v|val|valid|validation|eval|dev)|(test)|t|tr|train)"
    r"(?=(?:loss|acc|accuracy|error|err|ppl|perplexity)(?![a-z]))"
)
"""Matches ``vloss``, ``tacc``, ``testloss``."""
_ENGLISH = tuple((re.compile(pattern), f" {term} ") for term, pattern in {
    "return": r"\bep ret\b",
    "map": r"map@?\[?(?:0?\.)?50[-:](?:0?\.)?95\]?|\bmap\b",
    "r2": r"(?<![a-z])r(?:\^2|²|[-_ ]squared|[- ]?sq)(?![a-z])",
    "validation": r"validierungs?|validaci[oó]n|valida[cç][aã]o|验证",
    "train": r"trainings?(?=[a-z])|entra[iî]nement|entrenamiento|treino|训练",
    "loss": r"verlust|\bperte|p[eé]rdida|\bperda|损失",
    "accuracy": r"genauigkeit|exactitude?|acur[aá]cia|准确率",
    "error": r"\bfehler",
    "epoch": r"\bepoche|\b[eé]po(?:que|ca)|轮次",
    "step": r"\bschritte?\b|\b[eé]tape|\bpasos?\b|步数|^up\.$",
    "avg": r"\bmittlerer?\b|\bdurchschnitt\w*|\b(?:mean|average|overall)\b",
    "xent": r"cross[-_ ]?entropy",
}.items())  # fmt: skip
"""Spellings of one word, applied in this order to a lower-case name."""
_CAPITALS = re.compile(r"mAP|mIoU|TopK|(?<=[a-z])(?=[A-Z])")
"""Start of a name's next word; mAP, mIoU and TopK are single words despite their capitals."""


@lru_cache(maxsize=4096)
def terms_of(name: str) -> tuple[str, ...]:
    """A name's words in lower case and English: ``val/avg_loss`` and ``vloss`` both have val and loss."""
    text = _CAPITALS.sub(lambda m: m[0].lower() or " ", name).lower().replace("_", " ")
    text = re.sub(r"@(\d+)$", r" top\1", text)
    for pattern, term in _ENGLISH:
        text = pattern.sub(term, text)
    text = _PREFIXED.sub(lambda m: " val " if m[1] else " test " if m[2] else " train ", text)
    return tuple(re.findall(r"[^\W\d_][^\W_]*|\d+", text))


def of_an_eval(text: str) -> bool:
    """Whether a text contains a word of an eval."""
    return not EVAL_NAMES.isdisjoint(terms_of(text))


def unit_of(parts: Sequence[str]) -> str:
    """samples, step or epoch if a name of these parts is a progress counter, else ""."""
    return "" if not parts or _SETTINGS & {*parts} else _PROGRESS.get(parts[-1], "")


@lru_cache(maxsize=4096)
def name_score(parts: Collection[str]) -> int:
    """How much a name of these parts looks like an eval's: 0 for no metric, 15 for ``val loss``."""
    known = {*parts}
    kind = max((_MEASURES.get(term, 0) for term in known), default=0)
    if not kind:
        kind = max((_MEASURES.get(term.rstrip("0123456789"), 1) - 1 for term in known), default=0)
    if not kind and known & EVAL_NAMES:
        kind = max((_OF_EVALS.get(term, 0) for term in known), default=0)
    if not kind or known & _SPREADS or (known & _CHANGES and "to" not in known):
        return 0
    named = 4 * bool(EVAL_NAMES & known) - 2 * bool(_TRAIN_NAMES & known) - 6 * bool(_BEST & known)
    return max(0, kind + 2 * named)


def of_test_set(parts: Collection[str]) -> bool:
    """Whether a name of these parts is of a test set, which is used if there is no validation set."""
    return {*parts} & EVAL_NAMES == {"test"}


def other_sets(name: str, names: Collection[str]) -> tuple[str, ...]:
    """Those of ``names`` with the same metric as ``name`` on other data sets: ``val loss code`` for ``val loss wiki``.

    Names are words separated by blanks. One without a data set's word, such as ``val loss``, is a total.
    """
    ranks = {term for other in (name, *names) for term in other.split() if re.fullmatch(r"top\d+", term)}
    common = EVAL_NAMES | _TRAIN_NAMES | _MEASURES.keys() | ranks
    prefix, known = {*name.split()} - common, {*name.split()} & common
    return tuple(n for n in names if prefix and ({*n.split()} & common) == known and {*n.split()} - common - prefix)


@dataclass(frozen=True, slots=True)
class Token:
    """A name, as words, and its number.

    Parameters
    ----------
    terms : tuple of str
        The words of the name, preceded by those of its data set.
    number : str
        As printed; a count "of" a total is a fraction.
    unit : str
        samples, step or epoch for a progress counter; "" for a metric.
    raw : str
        The name as printed.
    nameless : bool
        Whether it is a number without a name, in brackets or before a colon, which may count anything.
    heading : bool
        Whether a word of its name is from a heading above the line.
    """

    terms: tuple[str, ...]
    number: str
    unit: str = ""
    raw: str = ""
    nameless: bool = False
    heading: bool = False

    @property
    def name(self) -> str:
        """The words, separated by blanks."""
        return " ".join(self.terms)

    @property
    def spelling(self) -> str:
        """The name as printed if it is complete; else its words."""
        return self.raw if terms_of(self.raw) == self.terms else self.name

    @property
    def bare(self) -> bool:
        """Whether it names only a data set: ``val 2.31``."""
        return len(self.terms) == 1 and self.terms[0] in EVAL_NAMES

    @property
    def score(self) -> int:
        """How much the name looks like an eval's: 0 for no metric."""
        if self.bare:
            return _BARE if "." in self.number else 0
        return 0 if self.unit else name_score(self.terms)

    @property
    def trains(self) -> bool:
        """Whether the name is of a training loss."""
        known = {*self.terms}
        return "loss" in known and not known & (EVAL_NAMES | _BEST)

    @property
    def falls(self) -> bool:
        """Whether the metric is minimised."""
        known = {term.rstrip("0123456789") for term in self.terms} | {*self.terms}
        return not ({*_SHARES, "score", "em"} & known) or bool({*_LOSSES, "error", "err"} & known)


_SPLIT = re.compile(  # a word for the data set of the numbers after it; not part of a path, a file or a longer name
    rf"(?i)(?<![\w/.-])({'|'.join(EVAL_NAMES)}|evaluating|validierung|train|training|oof)(?:(?-i:(?=[A-Z][a-z]))|(?:-set-\w+|-set\b)|(?![a-z/]|\.\w|-|_[a-z]))"
)
_AVERAGE = re.compile(r"(?i)[\[(](?:avg|average|mean|overall)[\])]")
_BELOW, _HEADING_LENGTH, _RULES = 6, 80, ":=*#~-─━"
_SECTION = re.compile(r"\|\s+(?P<name>\w+)/\s+\|")

_CELL_NAME = re.compile(r"[^\W\d_][\w./ ()%@-]*|#")
_BAR = re.compile(r":?\s+\d+%(?:\||\s*━).*")
"""A progress bar after a row."""
_TUPLE = re.compile(r"\s*\((?P<names>[A-Za-z]\w*(?:, ?[A-Za-z]\w*)+)\) = \((?P<values>[^()]*)\)\s*$")
"""Output of Julia's ``@show (epoch, val_loss)``."""


def _framed(line: str) -> list[str]:
    """The cells of a row of a Markdown table or one drawn with lines; none without a frame."""
    cells = re.split(r"[|│┃]", line.strip())
    return cells[1:-1] if len(cells) > 3 and not cells[0] and not cells[-1] else []


_FORMS: tuple[Callable[[str], list[str]], ...] = (
    lambda line: line.split(","),
    lambda line: line.split(";"),
    lambda line: line.split("\t"),
    _framed,
    lambda line: re.split(r"\s{2,}", line.strip()),
    str.split,
)
_COLUMNS = {"e": ("epoch",), "#": ("step",)}
"""Column names of spaCy."""


class Tokens:
    """Reads lines in order, since some lines describe those below them."""

    def __init__(self) -> None:
        self._heading, self._below = "", _BELOW
        self._columns: list[tuple[str, ...]] = []
        self._cells: Callable[[str], list[str]] = str.split
        self._of_eval = False
        self._headers = 0

    @property
    def state(self) -> tuple[str, int]:
        """State that affects the next line: the heading above it, and the number of the header for its columns."""
        return self._heading if self._below < _BELOW else "", self._headers

    def of(self, line: str) -> list[Token]:
        """The tokens of the line, in order."""
        tokens, heading = self.read(line)
        self.go_on(heading)
        return tokens

    def go_on(self, heading: str | None) -> None:
        """Count a line. heading: what it states about the lines below it, None for nothing."""
        self._below += 1
        if heading is not None:
            self._heading, self._below = heading, 0

    def read(self, line: str) -> tuple[list[Token], str | None]:
        """The tokens of the line, and its heading for the lines below; only a header's columns change the state."""
        if shown := _TUPLE.match(line):
            pairs = zip(shown["names"].split(","), shown["values"].split(","), strict=False)
            return [_token(terms_of(name), value.strip(), name.strip()) for name, value in pairs], None
        if row := self._row(line):
            return row, None
        if self._header(line):
            return [], None
        tokens = [*self._pairs(line), *_positions(line)]
        if not any(token.unit for token in tokens):
            tokens = _numbered(tokens) or tokens + _nameless(line)
        return tokens, _heading(line, tokens)

    def _pairs(self, line: str) -> Iterator[Token]:
        if not _matters(line):
            return
        before, known, matches = line, set[tuple[str, ...]](), [*_PAIR.finditer(line)]
        own = {terms_of(match["name"]) for match in matches if ". " not in match["name"]}
        for match in matches:
            ended = max(
                (m.end() + 2 for m in _SPLIT.finditer(match["name"]) if match["name"].startswith(". ", m.end())),
                default=0,
            )  # "split test. loss 2.3"
            begin = match.start("name") + ended + _idle(match["name"][ended:])
            raw, number, end = line[begin : match.end("name")], match["number"], match.end()
            terms = terms_of(re.sub(r" [(\[][^)\]]*(?:prev|curr|step|iter)[^)\]]*[)\]]", "", raw))
            if (unit := unit_of(terms)) and (terms := _counter(terms)):
                if number[:1].isdigit() and not _is_misread(line, match, terms):
                    yield Token(terms, number, unit, raw)
                continue
            if name_score(terms) and number.isdigit() and not match["of"] and (second := _SECOND.match(line, end)):
                terms, number = (*terms, number), second["number"]
            elif _is_misread(line, match, terms):
                continue
            if (mean := MEAN.match(line, end)) and (mean["number"][0] == "-") == (number[0] == "-"):
                number = mean["number"]
            elif match["of"] and not unit:
                number = _share(number, match["of"][1:])
            of_set, heading = self._of_set(line, before, begin, terms)
            terms = terms if of_set in own else of_set  # e.g. "Val steps: 2 loss: 1.9 val_loss: 0.8"
            if terms in known:
                continue
            known.add(terms)
            before = before[:begin] + " " * (end - begin) + before[end:] if name_score(terms) else before
            yield Token(terms, number, "", raw, heading=heading)
        for match in _SHARE.finditer(line):
            terms, heading = self._of_set(line, line, match.start(), ("correct",))
            yield Token(terms, _share(match["number"], match["of"]), "", "correct", heading=heading)

    def _of_set(self, line: str, before: str, begin: int, parts: tuple[str, ...]) -> tuple[tuple[str, ...], bool]:
        """The parts, preceded by their data set if the name lacks one; and whether that is from a heading."""
        if _AVERAGE.search(line, 0, begin):
            parts = ("avg", *parts)
        if {*parts} & (EVAL_NAMES | _TRAIN_NAMES - {"lm"}):
            return parts, False
        splits = [match[0] for match in _SPLIT.finditer(before, 0, begin)]
        if splits:
            prefix = max((terms_of(s) for s in splits if s.startswith(splits[-1])), key=len)
            return ((*prefix, *parts) if {*prefix} & EVAL_NAMES else parts), False
        if self.state[0] and not _OF_AN_EPOCH.search(line) and (name_score(parts) or _OF_EVALS.keys() & {*parts}):
            return (self._heading, *parts), True
        return parts, False

    def _header(self, line: str) -> bool:
        """Whether the line has the column names of the rows below it."""
        line = _BAR.sub("", line)
        if len(line) > 400 or not _matters(line):
            return False
        for cells in _FORMS:
            names = [cell.strip().strip('"') for cell in cells(line)]
            if len(names) < 2 or not all(map(_CELL_NAME.fullmatch, names)):
                continue
            columns = [_COLUMNS.get(name.lower(), terms_of(name)) for name in names]
            units, scores = [*map(unit_of, columns)], [*map(_column_score, columns)]
            of_eval = names[0].lower() in ("class", "classes")
            if any(scores) and (any(units) or of_eval):
                self._cells, self._columns, self._of_eval = cells, columns, of_eval
                self._headers += 1
                return True
        return False

    def _row(self, line: str) -> list[Token]:
        """The tokens of a row below a header; none for other lines."""
        if not self._columns:
            return []
        cells = [cell.strip().strip('"') for cell in self._cells(_BAR.sub("", line))]
        if len(cells) != len(self._columns) and self._cells is not str.split:
            cells = line.split() if len(line.split()) == len(self._columns) else cells
        if len(cells) != len(self._columns):
            return []
        numbers = [re.sub(r"^(\d+)/\d+$", r"\1", cell) for cell in cells]
        texts = [cell for cell, number in zip(cells, numbers, strict=True) if cell and as_number(number) is None]
        if len(texts) > (len(cells) - 1) // 2 or (self._of_eval and cells[0] != "all"):
            return []
        rows = zip(self._columns, numbers, strict=True)
        split = ("val",) if self._of_eval else ()
        tokens = [_token((*split, *terms), number) for terms, number in rows if as_number(number) is not None]
        return [t if t.terms != ("score",) else Token(("val", "score"), t.number) for t in tokens]


def _column_score(parts: tuple[str, ...]) -> int:
    return Token(parts, "0.0").score or int(parts == ("score",))


def _token(parts: tuple[str, ...], number: str, raw: str = "") -> Token:
    unit = unit_of(parts)
    return Token(_counter(parts) if unit else parts, number, unit, raw)


def _counter(parts: tuple[str, ...]) -> tuple[str, ...]:
    """The parts of a counter's name: ``validation loss at iteration`` counts iterations."""
    prefix = parts[-1:]
    for term in reversed(parts[:-1]):
        if term not in EVAL_NAMES | _TRAIN_NAMES | {"global", "total", "num", "consumed", "trained", "env"}:
            break
        prefix = (term, *prefix)
    return prefix


def _share(number: str, of: str) -> str:
    """``612/1000`` as 0.612."""
    whole, part = as_number(of.strip()), as_number(number)
    return number if not whole or part is None else f"{part / whole:.10g}"


def _is_misread(line: str, match: re.Match[str], parts: tuple[str, ...]) -> bool:
    """Whether the number is misread: it has a decimal comma, or is the percentage of an epoch."""
    at, number = match.start("number"), match["number"]
    if re.compile(r"\d++,\d").match(line, at) and ("," not in number or not (unit_of(parts) or "." in number)):
        return True
    is_bare = len(parts) == 1 and parts[0] in EVAL_NAMES and match["between"].strip() != ""  # "Valid: 70.1%"
    return re.compile(r"\s?%").match(line, match.end()) is not None and not (
        name_score(parts) or _OF_EVALS.keys() & {*parts} or is_bare
    )


_MATTER = EVAL_NAMES | _TRAIN_NAMES | _MEASURES.keys() | _BEST | _PROGRESS.keys() | _SETTINGS | {"global", "avg"}


def _idle(name: str) -> int:
    """Characters of a name before its first relevant word: ``done with val loss`` -> 10."""
    for term in re.finditer(r"\S+", name):
        if {re.sub(r"(?<=..)\d+$", "", w) for w in terms_of(term[0])} & _MATTER or {*terms_of(term[0])} & _MATTER:
            return term.start()
    return 0


_FOREIGN = ("verlust", "genauigkeit", "schritt", "perte", "rdida", "perda", "fehler", "acur", "exactit", "poca",
            "poque", "损失", "准确率", "轮次", "步数", "tape", "paso")  # fmt: skip
_LONG = tuple(
    term
    for term in sorted({*_MEASURES, *_OF_EVALS, *EVAL_NAMES, *_PROGRESS, "entropy", "mean", "epret", *_FOREIGN})
    if len(term) > 2 or not term.isascii()
)
_SHORT = re.compile(r"(?<![A-Za-z])(?i:it|ap|ce|f1|r2|r²|r\^2|l1|l2|em)(?![a-z])|(?<=[a-z])(?:AP|CE|F1|R2)|\[batch=")


def _matters(line: str) -> bool:
    """Whether a line has any word of a metric or a progress counter."""
    small = line.lower()
    return any(term in small for term in _LONG) or _SHORT.search(line) is not None


def _heading(line: str, tokens: Sequence[Token]) -> str | None:
    """Data set of the lines below, by a heading or an eval's batch; "" after a word of training, None if unchanged."""
    if section := _SECTION.match(line):
        term = next((m[0].lower() for m in _SPLIT.finditer(section["name"])), "")
    elif _is_heading(line, tokens):
        term = next((m[0].lower() for m in _SPLIT.finditer(line)), "")
    else:
        term, trains = "", _OF_AN_EPOCH.search(line) or any(m[1].lower() in _TRAIN_NAMES for m in _SPLIT.finditer(line))
        if not trains and (not any(t.unit and not t.nameless for t in tokens) or any(t.score for t in tokens)):
            return None
    known = {*terms_of(term)} | {term}
    return "" if not term or known & _TRAIN_NAMES else "test" if "test" in known else "val"


def _is_heading(line: str, tokens: Sequence[Token]) -> bool:
    """Whether a line describes the lines below it: ``=== evaluation ===``, ``Test error:``, ``Eval begin``."""
    text = line.strip()
    if batch_of(line):
        return True
    if len(text) >= _HEADING_LENGTH or not any(map(str.isalpha, text)):
        return False
    marked = text[-1:] in _RULES or text[:2] in {2 * mark for mark in _RULES[1:]}
    return marked or (_SPLIT.search(text) is not None and not any(t.score or t.unit for t in tokens))


def _positions(line: str) -> Iterator[Token]:
    """Progress stated without a name before the number: ``after 1024 samples``, ``Epoch [1/4]``."""
    for form in (_COUNT, *_OPENED):
        for match in form.finditer(line):
            yield _token(terms_of(match["name"] or "") or ("epoch",), match["number"])


def _nameless(line: str) -> list[Token]:
    matches = [match for form in _NAMELESS for match in form.finditer(line)]
    return [Token(("count",), match["number"], "step", nameless=True) for match in matches[:1]]


def _numbered(tokens: Sequence[Token]) -> list[Token]:
    """Tokens of ``Validation loss 100: 0.81`` without another counter: the name's number counts. [] for other lines."""
    if len(tokens) != 1 or tokens[0].terms == terms_of(tokens[0].raw) or not (at := tokens[0].terms[-1]).isdigit():
        return []
    return [replace(tokens[0], terms=tokens[0].terms[:-1]), Token(("count",), at, "step", nameless=True)]


def batch_of(line: str) -> tuple[int, int] | None:
    """Batch and number of batches of an eval's line: ``Test: [ 78/78]``; None for others."""
    split = _SPLIT.match(line.strip())
    batch = _BATCH.search(line) if split and split[1].lower() not in _TRAIN_NAMES else None
    return (int(batch["at"]), int(batch["of"])) if batch else None


def losses(line: str) -> list[Token]:
    """The metrics in a line, most like an eval first."""
    return sorted((token for token in Tokens().of(line) if token.score), key=lambda token: -token.score)


def positions(line: str) -> list[Token]:
    """The progress counters in a line, finest first."""
    return sorted((token for token in Tokens().of(line) if token.unit), key=lambda token: ORDER.index(token.unit))


_MOST_FORMS = 4096
_LONGEST_FORM = 400
_DIGITS = re.compile(r"(?<![A-Za-z_@\d])\d+")
"""Digits that are not part of a name."""
_THOUSANDS = re.compile(r"\d[,_]\d")


class Numbers:
    """Numbers of given names, line after line. Lines that differ only in digits are parsed once.

    names: keys of the numbers in the result, by the words of the name and its unit.
    """

    def __init__(self, names: Mapping[tuple[tuple[str, ...], str], str]) -> None:
        self._names, self._tokens = names, Tokens()
        self._forms: dict[tuple[str, tuple[str, int]], tuple[re.Pattern[str] | None, list[str], str | None]] = {}

    def of(self, line: str) -> dict[str, str]:
        """The first number of each name in the line."""
        tokens = self._tokens
        before = tokens.state
        key = (_DIGITS.sub("0", line), before)
        if form := self._forms.get(key):
            pattern, names, heading = form
            tokens.go_on(heading)
            match = pattern and pattern.fullmatch(line)
            return dict(zip(names, match.groups(), strict=True)) if match else {}
        stated, heading = tokens.read(line)
        tokens.go_on(heading)
        numbers = {name: t.number for t in reversed(stated) if (name := self._names.get((t.terms, t.unit)))}
        header = tokens.state[1] != before[1]
        numbered = any(term.isdigit() for token in stated for term in token.terms) or _THOUSANDS.search(line)
        whole = not (header or numbered) and len(line) < _LONGEST_FORM and len(self._forms) < _MOST_FORMS
        if whole and (pattern_of := _pattern_of(line, numbers)) is not None:
            self._forms[key] = (*pattern_of, heading)
        return numbers


def _pattern_of(line: str, numbers: Mapping[str, str]) -> tuple[re.Pattern[str] | None, list[str]] | None:
    """Pattern and names of these numbers in lines of this form; None if one occurs twice or is a fraction."""
    if not numbers:
        return None, []
    places = []
    for name, number in numbers.items():
        matches = [*re.finditer(rf"(?<![\w.]){re.escape(number)}(?!\w|\.\d)", line)]
        if len(matches) != 1 or not _DIGITS.search(number):
            return None
        places.append((*matches[0].span(), name))
    text, at = "", 0
    for begin, end, _ in sorted(places):
        if begin < at:
            return None
        text += f"{_form(line[at:begin])}({_form(line[begin:end])})"
        at = end
    return re.compile(text + _form(line[at:])), [name for _, _, name in sorted(places)]


def _form(text: str) -> str:
    """A pattern of texts that differ only in digits."""
    return r"\d+".join(map(re.escape, _DIGITS.split(text)))


# Numbers in a German, French or Brazilian locale: ``1.234,5`` for 1,234.5.


_NUMBER = re.compile(r"(?<![\w.,])(?:\d{1,3}(?:\.\d{3})++(?:,\d++)?+|\d++,\d++)(?![.,]?\d)")
_SWAPPED = str.maketrans(",.", ".,")
_NO_THOUSANDS = re.compile(
    r"(?<!\d)(?<!\d\d:)\d++,\d++(?<![1-9],\d\d\d)(?<![1-9]\d,\d\d\d)(?<![1-9]\d\d,\d\d\d)(?![.,]?\d)"
)
"""A comma that is not a thousands separator: ``0,925``, ``2,5``, but not ``1,200``."""


def decimal_points(text: str) -> str:
    """The text, of the same length, with numbers in decimal comma notation converted (``1.234,5`` to ``1,234.5``)."""
    return _NUMBER.sub(lambda number: number[0].translate(_SWAPPED), text) if "," in text or "." in text else text


def in_use(lines: Sequence[str]) -> bool:
    """Whether metrics certainly have a decimal comma, by their names or in a table with semicolons."""
    return any(_in_use(line) for line in lines if _NO_THOUSANDS.search(line))


def _in_use(line: str) -> bool:
    if ";" in line and any(_NO_THOUSANDS.fullmatch(cell.strip()) for cell in line.split(";")):
        return True
    commas = {decimal_points(number[0]) for number in _NO_THOUSANDS.finditer(line)}
    return any(token.score and token.number in commas for token in Tokens().of(decimal_points(line)))
