"""Which parameters of a study a user's script reads, judged by the command and the script's text without running it.

A parameter reaches a script as a word of its command, or as an environment variable. Whether the script reads it is
known only if all code is available: the script and the modules in its folder that it imports, with the rest from the
standard library or from libraries that their caller configures. Otherwise it is unknown.
"""

from __future__ import annotations

import ast
import enum
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lora_tune.config.parameters import TunedParameter
from lora_tune.config.space import Space

PLACE = re.compile(r"\{([A-Za-z_]\w*)\}")
"""Placeholder of a parameter's value in a command."""

_MAX_FILES = 200
_MAX_BYTES = 1 << 20

_LAUNCHERS = frozenset({
    "python", "python3", "torchrun", "accelerate", "deepspeed", "launch", "uv", "poetry", "pdm", "run", "exec",
    "env", "nice", "stdbuf", "numactl", "time",
})  # fmt: skip
"""Words that may precede the script in a command, besides options and their values."""

_LIBRARIES = frozenset({
    "torch", "torchvision", "torchaudio", "torchmetrics", "numpy", "pandas", "scipy", "sklearn", "matplotlib",
    "seaborn", "tqdm", "transformers", "datasets", "peft", "tokenizers", "safetensors", "accelerate",
    "evaluate", "bitsandbytes", "timm", "PIL", "cv2", "einops", "xgboost", "lightgbm", "catboost", "jax",
    "jaxlib", "flax", "optax", "haiku", "keras", "tensorflow", "lightning", "pytorch_lightning", "trl",
    "sentencepiece", "nltk", "yaml", "requests", "joblib", "h5py", "pyarrow", "statsmodels", "optuna",
    "gymnasium", "gym", "stable_baselines3", "torch_geometric", "diffusers", "tiktoken", "rich", "psutil",
    "mlperf_logging", "tensorboard", "tensorboardX", "wandb",
})  # fmt: skip
"""Libraries that read neither the command line nor variables named by a study."""

_OF_LIBRARIES = re.compile(
    r"(?:CUDA|CUBLAS|CUDNN|NVIDIA|NV|NVTE|NCCL|UCX|UCC|OMPI|SLURM|PMI|OMP|MKL|KMP|GOMP|OPENBLAS|NUMEXPR|TORCH|PYTORCH|ATEN|"
    r"TRITON|INDUCTOR|XLA|JAX|TF|HF|HUGGINGFACE|TRANSFORMERS|TOKENIZERS|DATASETS|ACCELERATE|FSDP|DEEPSPEED|DS|MASTER|"
    r"WORLD|RANK|LOCAL|NODE|GLOO|TP|WANDB|MLFLOW|RAY|DATALOADER|MALLOC|LD|PYTHON|BITSANDBYTES|BNB|FLASH|VLLM|ROCM|HIP|"
    r"MIOPEN|HSA|RCCL|NVSHMEM|TE|GLIBC|JEMALLOC|TCMALLOC|PATH|HOME|TMPDIR|LANG|TZ)(?:_\w+|)|PYTHON\w+|TORCH\w+"
)
"""Variables that libraries, launchers or the system read, whatever the script's text."""

_COMMAND_LINES = frozenset({
    "absl", "click", "configargparse", "docopt", "fire", "hydra", "jsonargparse", "omegaconf", "simple_parsing",
    "typer", "tyro",
})  # fmt: skip
"""Libraries that read the command line."""

_VARIABLES_TOO = frozenset({
    "click", "configargparse", "hydra", "jsonargparse", "omegaconf", "typer",
})  # fmt: skip
"""Those of them that may read variables, by names in a text or in a config file."""

_PARSERS = frozenset({
    "argv", "orig_argv", "argparse", "optparse", "getopt", "ArgumentParser", "HfArgumentParser", "TrlParser",
    "LightningCLI", "flags", "FLAGS",
})  # fmt: skip
"""Names whose use shows that a script may read its command line."""

_FURTHER = frozenset({
    "subprocess", "system", "popen", "Popen", "execv", "execve", "execvp", "execvpe", "execl", "execle",
    "execlp", "spawnv", "spawnl", "posix_spawn", "runpy", "importlib", "import_module", "__import__", "exec",
    "eval", "execfile", "pty", "ctypes", "environb",
})  # fmt: skip
"""Names by which a script may run other programs or code that is not available here."""

_MODULES_THAT_START_OTHERS = frozenset({
    "subprocess", "runpy", "importlib", "pty", "ctypes", "code", "imp", "pkgutil",
})  # fmt: skip


class Reach(enum.Enum):
    """Whether a script reads a parameter."""

    YES = enum.auto()
    NO = enum.auto()
    UNKNOWN = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptText:
    """What a script reads, judged by its text.

    Parameters
    ----------
    name : str
        The script as in the command; "" if its text is not available.
    whole : bool
        Whether all code that it runs was read; False: it may read more than is listed here.
    variables : frozenset of str
        Environment variables that it reads by name, and other names that may be variables.
    defaults : mapping of str to str
        Its defaults of unset variables, as in the text; "" if they are not single values.
    any_variable : bool
        Whether it may read variables by computed names.
    command_line : bool
        Whether it may read its command line.
    """

    name: str = ""
    whole: bool = False
    variables: frozenset[str] = frozenset()
    defaults: Mapping[str, str] = field(default_factory=dict)
    any_variable: bool = True
    command_line: bool = True


def script_text(argv: Sequence[str], folder: Path) -> ScriptText:
    """What the script in ``argv`` reads, judged by its text. folder: working folder of the command."""
    script = _script(argv, folder)
    if script is None:
        return ScriptText(variables=_names_in_files(argv, folder), defaults=_defaults_in_shell(argv, folder))
    token, text, place = script
    read = _Texts(place)
    read.take(text)
    files = _names_in_files((*argv, *read.literals), folder)
    return ScriptText(
        name=token,
        whole=read.whole,
        variables=frozenset(read.variables) | files | (frozenset(read.literals) if read.any_variable else frozenset()),
        defaults=read.defaults,
        any_variable=read.any_variable,
        command_line=read.command_line or not read.whole,
    )


def reach(
    name: str, argv: Iterable[str], environment: Mapping[str, str], script: ScriptText, files: Iterable[str] = ()
) -> Reach:
    """Whether the parameter ``name`` reaches the script.

    argv, environment, files: words of the command, variables by name, and values of its config file, each of which may
    contain ``{name}``.
    """
    if any(name in PLACE.findall(value) for value in files):
        return Reach.YES
    if any(name in PLACE.findall(token) for token in argv) and script.command_line:
        return Reach.YES
    variables = variables_of(name, environment)
    if not script.variables.isdisjoint(variables):
        return Reach.YES
    if not script.whole or script.any_variable or any(map(_OF_LIBRARIES.fullmatch, variables)):
        return Reach.UNKNOWN if variables == [name] else Reach.YES  # a variable that the study names counts as read
    return Reach.NO


def variables_of(name: str, environment: Mapping[str, str]) -> list[str]:
    """The variables with the parameter's value: its own, and those of ``environment`` that contain it."""
    return [name, *(variable for variable, text in environment.items() if name in PLACE.findall(text))]


def reaches(
    space: Space, argv: Sequence[str], environment: Mapping[str, str], script: ScriptText, files: Sequence[str] = ()
) -> dict[str, Reach]:
    """Whether each tuned parameter of a space reaches the script.

    A parameter also counts as reaching it through derived or conditional parameters. Layouts and ``NODES`` are left
    out, because they change the job itself.
    """
    each = {name: reach(name, argv, environment, script, files) for name in space.parameters}
    for child, parents in reversed([*space.conditions.of.items()]):
        each |= {name: max(each[name], each[child], key=_CERTAINTY.index) for name in parents}
    tuned = [n for n, p in space.parameters.items() if isinstance(p, TunedParameter) and n != "NODES"]
    return {n: max((each[m] for m in (n, *space.following({n}))), key=_CERTAINTY.index) for n in tuned}


_CERTAINTY = (Reach.NO, Reach.UNKNOWN, Reach.YES)


def idle_sentence(names: Sequence[str], argv: Sequence[str], environment: Mapping[str, str], script: ScriptText) -> str:
    """The message that parameters have no effect, with a remedy."""
    variables = [variable for name in names for variable in variables_of(name, environment)]
    named = [name for name in names if any(name in PLACE.findall(token) for token in argv)]
    reads = (
        "no word of its command line"
        if named
        else f"no variable {' or '.join(variables)}, and no word of argv holds it"
    )
    return (
        f"{', '.join(names)} {'reach' if len(names) > 1 else 'reaches'} nothing: {script.name} reads {reads}; "
        f"write {{{names[0]}}} in workload.argv where the script has an option for it, or let the script read "
        f'os.environ["{names[0]}"]'
    )


def unsure_sentence(names: Sequence[str]) -> str:
    """The message that the effect of parameters is unknown before a run."""
    several = len(names) > 1
    return (
        f"whether the script reads the variable{'s' if several else ''} {', '.join(names)}, which no word of "
        f"workload.argv holds, cannot be known before it runs; trials with the same evals would show that it does not"
    )


def _script(argv: Sequence[str], folder: Path) -> tuple[str, str, Path] | None:
    """The script's word, its text and its folder; None for another program or an unreadable text."""
    tokens = list(argv)
    if tokens[2:3] in (["lora_tune.logs.relay"], ["lora_tune.recipes.relay"]) and "--" in tokens:
        tokens = tokens[tokens.index("--") + 1 :]
    for at, token in enumerate(tokens):
        if token == "-c" and at and _stem(tokens[at - 1]).startswith("python") and at + 1 < len(tokens):
            return "the text behind -c", tokens[at + 1], folder
        if token in ("-m", "--module") and tokens[at + 1 : at + 2] not in (["torch.distributed.run"], ["accelerate"]):
            return None
        if token.endswith(".py") and not PLACE.search(token):
            return _read(token, folder)
        known = token.startswith("-") or _stem(token) in _LAUNCHERS or "=" in token
        if not known and not (at and tokens[at - 1].startswith("-")):
            return None
    return None


def _read(token: str, folder: Path) -> tuple[str, str, Path] | None:
    path = folder / Path(token).expanduser()
    text = _text(path)
    return None if text is None else (token, text, path.parent)


def _stem(token: str) -> str:
    return re.sub(r"[\d.]+$", "", Path(token).name) or token


def _text(path: Path) -> str | None:
    """A file's text; None if it cannot be read as one."""
    try:
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return None
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _names_in_files(argv: Iterable[str], folder: Path) -> frozenset[str]:
    """Identifiers in the config files and shell scripts of ``argv``; each may be a variable."""
    names: set[str] = set()
    for token in argv:
        file = token.rpartition("=")[2]
        if file.endswith((".yaml", ".yml", ".json", ".toml", ".ini", ".cfg", ".sh", ".sub", ".slurm", ".env")):
            names.update(re.findall(r"[A-Za-z_]\w*", _text(folder / Path(file).expanduser()) or ""))
    return frozenset(names)


_SHELL_DEFAULT = re.compile(r"\$\{(?P<name>[A-Za-z_]\w*):?[-=](?P<value>[^${}]*)\}")
"""``${LR:-3e-4}``: a variable and its default."""


def _defaults_in_shell(argv: Sequence[str], folder: Path) -> dict[str, str]:
    """Defaults of variables in shell code of the command or its scripts, and in the Python files that these start.

    Variables that the code sets before it reads them are left out.
    """
    files = [text for token in argv if token.endswith(".sh") and (text := _text(folder / Path(token).expanduser()))]
    defaults: dict[str, str] = {}
    for text in [*files, *(token for token in argv if len(token.split()) > 1)]:
        code = re.sub(r"(?m)^\s*#.*", "", text)
        for match in _SHELL_DEFAULT.finditer(code):
            name = match["name"]
            if not re.search(rf"(?m)^\s*(?:export\s+)?{name}=(?!.*\$\{{{name}\b)", code[: match.start()]):
                defaults.setdefault(name, match["value"].strip("\"'"))
        for token in re.findall(r"[\w./-]+\.py\b", code):
            if (python := _text(folder / token)) is not None:
                read = _Texts((folder / token).parent)
                read.take(python)
                defaults = {**read.defaults, **{n: v or read.defaults.get(n, "") for n, v in defaults.items()}}
    return defaults


class _Texts:
    """Collects what a script and the modules that it imports read. folder: the script's own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._taken: set[Path] = set()
        self.whole = True
        self.any_variable = False
        self.command_line = False
        self.variables: set[str] = set()
        self.defaults: dict[str, str] = {}
        self.literals: set[str] = set()

    def take(self, text: str, package: Path | None = None) -> None:
        """Read one module's text. package: start folder of its relative imports."""
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            self.whole = False
            return
        parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._follow(node, package or self._folder)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                self.literals.update(re.findall(r"[A-Za-z_][\w./-]*", node.value[:4096]))
            elif isinstance(node, ast.Name | ast.Attribute):
                self._name(node, parents)
        for name, default in _defaults(tree, parents):
            self.defaults[name] = self.defaults.get(name) or default

    def _name(self, node: ast.Name | ast.Attribute, parents: Mapping[ast.AST, ast.AST]) -> None:
        name = node.id if isinstance(node, ast.Name) else node.attr
        self.command_line |= name in _PARSERS
        self.whole &= name not in _FURTHER or _is_method(node)
        if name in ("environ", "getenv"):
            variable = _variable(node, name, parents)
            self.any_variable |= variable is None
            self.variables |= {variable} if variable else set()

    def _follow(self, node: ast.Import | ast.ImportFrom, package: Path) -> None:
        """Process an import statement; modules in the script's folder are read, too."""
        for start, module in _imported(node, self._folder, package):
            top = module.partition(".")[0]
            files = [*_files(start, module)]
            if files:
                self._open(files)
            elif start != self._folder:
                self.whole = False  # an unresolved relative import
            elif top in sys.stdlib_module_names:
                self.whole &= top not in _MODULES_THAT_START_OTHERS
                self.command_line |= top in _PARSERS
            elif top in _COMMAND_LINES:
                self.command_line = True
                self.any_variable |= top in _VARIABLES_TOO
            else:
                self.whole &= top in _LIBRARIES
        for alias in node.names:
            name = alias.name.rpartition(".")[2]
            self.command_line |= name in _PARSERS
            self.whole &= name not in _FURTHER
            if name in ("environ", "getenv") and alias.asname:
                self.any_variable = True

    def _open(self, files: Iterable[Path]) -> None:
        for file in files:
            if file in self._taken:
                continue
            self._taken.add(file)
            text = _text(file)
            if text is None or len(self._taken) > _MAX_FILES:
                self.whole = False
            else:
                self.take(text, file.parent)


def _imported(node: ast.Import | ast.ImportFrom, folder: Path, package: Path) -> Iterator[tuple[Path, str]]:
    """The start folder and the dotted name of each module in an import statement."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield folder, alias.name
        return
    start = folder
    if node.level:
        start = package
        for _ in range(node.level - 1):
            start = start.parent
    module = node.module or ""
    for alias in node.names:
        whole = f"{module}.{alias.name}".strip(".")
        yield start, whole if [*_files(start, whole)] else module or whole


def _files(start: Path, module: str) -> Iterator[Path]:
    """The files of a module and of its parent packages; none if it is not below ``start``."""
    parts = module.split(".")
    last = start.joinpath(*parts)
    if not (last.with_suffix(".py").is_file() or (last / "__init__.py").is_file()):
        return
    for count in range(1, len(parts) + 1):
        path = start.joinpath(*parts[:count])
        yield from (file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file())


def _is_method(node: ast.Name | ast.Attribute) -> bool:
    """Whether a name such as ``eval`` or ``system`` is a method of another object: ``model.eval()`` runs no code."""
    if not isinstance(node, ast.Attribute):
        return False
    of_os = isinstance(node.value, ast.Name) and node.value.id in ("os", "posix", "asyncio")
    return node.attr in ("eval", "exec", "system") and not of_os


def _variable(node: ast.AST, name: str, parents: Mapping[ast.AST, ast.AST]) -> str | None:
    """The variable read at ``environ`` or ``getenv``; None if the name is computed, "" if none is read."""
    parent = parents.get(node)
    if isinstance(parent, ast.Subscript) and parent.value is node and not isinstance(parent.ctx, ast.Load):
        return ""
    return _text_of([key]) if (key := _key(node, name, parents)) is not None else None


def _key(node: ast.AST, name: str, parents: Mapping[ast.AST, ast.AST]) -> ast.expr | None:
    """The expression of the variable's name at ``environ`` or ``getenv``; None if there is none."""
    parent = parents.get(node)
    if isinstance(parent, ast.Subscript) and parent.value is node:
        return parent.slice
    if isinstance(parent, ast.Compare) and node in parent.comparators:
        return parent.left
    call = parent
    if isinstance(parent, ast.Attribute) and parent.attr in ("get", "pop", "setdefault"):
        node, call = parent, parents.get(parent)
    elif name != "getenv":
        return None
    return call.args[0] if isinstance(call, ast.Call) and call.func is node and call.args else None


def _defaults(tree: ast.Module, parents: Mapping[ast.AST, ast.AST]) -> Iterator[tuple[str, str]]:
    """The variables that a module reads by name, with their defaults.

    Includes reads through a helper: ``def setting(name, default): ...os.environ.get(name, default)``.
    """
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    readers: dict[str, int] = {}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Name | ast.Attribute) and _last(node) in ("environ", "getenv")):
            continue
        if name := _variable(node, _last(node), parents):
            yield name, _literal(_stands_for(node, parents), constants)
            continue
        function: ast.AST | None = node
        while function is not None and not isinstance(function, ast.FunctionDef):
            function = parents.get(function)
        read = _key(node, _last(node), parents)
        names = [argument.arg for argument in function.args.args] if function is not None else []
        if function is not None and isinstance(read, ast.Name) and read.id in names:
            readers[function.name] = names.index(read.id)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in readers:
            at = readers[node.func.id]
            if name := _text_of(node.args[at:]):
                others = [*node.args[at + 1 :], *(keyword.value for keyword in node.keywords)]
                yield name, next(filter(None, (_literal(other, constants) for other in others)), "")


def _last(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr


def _stands_for(node: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> ast.AST | None:
    """The default of a variable: the second argument, or what follows ``or`` or ``else``."""
    while isinstance(parent := parents.get(node), ast.Attribute | ast.Subscript | ast.Call | ast.BoolOp | ast.IfExp):
        if isinstance(parent, ast.Call) and parent.func is node:
            defaults = [*parent.args[1:2], *(k.value for k in parent.keywords if k.arg == "default")]
            if defaults:
                return defaults[0]
        elif isinstance(parent, ast.BoolOp) and isinstance(parent.op, ast.Or) and parent.values[0] is node:
            return parent.values[1]
        elif isinstance(parent, ast.IfExp) and parent.body is node:
            return parent.orelse
        node = parent
    return None


def _literal(node: ast.AST | None, constants: Mapping[str, ast.expr]) -> str:
    """A literal number or text, also in ``str(...)`` or in a constant; "" for anything else."""
    if isinstance(node, ast.Call) and len(node.args) == 1 and isinstance(node.func, ast.Name):
        node = node.args[0]
    node = constants.get(node.id) if isinstance(node, ast.Name) else node
    try:
        value = None if node is None else ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return ""  # a computed value
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""


def defaults_of(script: ScriptText) -> dict[str, str]:
    """The script's own variables, not a library's or a launcher's, with their defaults."""
    return {name: value for name, value in script.defaults.items() if not _OF_LIBRARIES.fullmatch(name)}


def _text_of(arguments: Sequence[ast.expr]) -> str | None:
    first = arguments[0] if arguments else None
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None
