"""The slices of `bench/gpu.py`, and how long each takes. The estimates are computed from shapes and stated rates."""

from collections.abc import Callable
from dataclasses import dataclass

from bench.vllm_arms.sizes import GPU

LIMIT_S = 570
"""The limit of one slice, in seconds."""
START_S = 40.0
"""A process until it measures: imports, weights drawn on the device, kernels compiled."""
ENGINE_START_S = 60.0
"""A vLLM engine takes this long to start."""
TEST_S = 5.0
"""Most of them wait for the device to be busy or idle."""
TESTS, COPIER_TESTS = 7, 3
"""Tests that a GPU runs, and those of them that run under compute-sanitizer."""
SANITIZED = 10.0
"""A test under compute-sanitizer takes this many times as long."""
STEP_S = 0.03
"""A decode step in Transformers."""
DRIVE_BYTES_PER_S = 2e9
LOCK_BYTES_PER_S = 3e9
"""Faulting in and page-locking host memory."""
LINK_SHARE = 0.8
PRODUCT_SHARE = 0.7
"""The shares of the catalogue's rates that copies over the bus and a large bf16 product reach."""
KEPT_BYTES = {"deepseek-v2-lite": 27 * 16 * (192 + 128) * 2}
"""A token's KV where Transformers keeps more than an engine: keys and values of every head, in bf16."""

VLLM = ("bench/vllm.py",)
VLLM_WHEELS = ("vllm==0.33.0",)

Words = dict[str, str]
"""Options of a program; a flag is itself."""


@dataclass(frozen=True)
class Rates:
    """Speeds of the GPU that the estimates are for."""

    gpu: str = "h100-sxm"
    """A name of kvtier's catalogue; see `kvtier plan`."""

    def prefill_s(self, model: str, tokens: int) -> float:
        """Seconds to compute a prompt, at half of the GPU's bf16 peak."""
        from kvtier.tools.replay.tier_spec import find_parts, prefill_of  # noqa: PLC0415 - `missing` comes first

        return prefill_of(model, gpu=find_parts(self.gpu, "--gpu", "gpu")).seconds(0, tokens)

    def bytes_per_token(self, model: str) -> float:
        """The size of a token's KV in Transformers."""
        from kvtier.tools import size  # noqa: PLC0415

        return KEPT_BYTES.get(model) or size.of(model).bytes_per_token_stored

    def rate(self, name: str) -> float:
        """One of the catalogue's figures: ``flops`` (bf16) or ``link_bytes_per_s``."""
        from kvtier.tools.replay.tier_spec import find_parts  # noqa: PLC0415

        value = find_parts(self.gpu, "--gpu", "gpu").item.values[name]
        return float(value["bf16"] if isinstance(value, dict) else value)


@dataclass(frozen=True)
class Slice:
    """One program with its options."""

    what: str
    """It measures."""
    program: tuple[str, ...]
    estimate: Callable[[Words, Rates], float]
    """Seconds, of the program's options."""
    under: tuple[str, ...] = ()
    """A program that runs it."""
    modules: tuple[str, ...] = ()
    """Further modules that it needs."""
    wheels: tuple[str, ...] = ()
    """The requirements that bring these modules."""

    @property
    def is_tests(self) -> bool:
        """Whether it is a run of pytest, which has no record of its own."""
        return "pytest" in self.program

    @property
    def words(self) -> Words:
        """The options of the program."""
        found: Words = {}
        for word, after in zip(self.program, (*self.program[1:], "--"), strict=True):
            if word.startswith("--"):
                found[word] = word if after.startswith("--") else after
        return found

    @property
    def host_bytes(self) -> int:
        """Host memory that it page-locks."""
        default = {"bench/links.py": "64GiB", "bench/ttft.py": "32GiB", "bench/multiturn.py": "32GiB"}
        words = self.words
        found = words.get(
            "--lock", words.get("--host", next((default[it] for it in self.program if it in default), "0"))
        )
        attachments = 2 if "bench/multiturn.py" in self.program else 1
        return attachments * bytes_of(found) if "cpu" not in self.program else 0

    def estimate_s(self, rates: Rates) -> float:
        """Seconds that the slice will take."""
        return self.estimate(self.words, rates)


def tests_s(_words: Words, _rates: Rates) -> float:
    """A fixed number of seconds for each test of tests/gpu."""
    return START_S + TESTS * TEST_S


def sanitizer_s(_words: Words, _rates: Rates) -> float:
    """The same for those of the copier, and the start, under compute-sanitizer."""
    return 2 * START_S + COPIER_TESTS * TEST_S * SANITIZED


def links_s(words: Words, rates: Rates) -> float:
    """Host memory to lock, and three times the products; copies are short beside them."""
    repeats, products, order = (
        int(words.get(*it)) for it in (("--repeats", "7"), ("--products", "400"), ("--order", "8192"))
    )
    product_s = 2.0 * order**3 / (PRODUCT_SHARE * rates.rate("flops"))
    return (
        START_S + bytes_of(words.get("--lock", "64GiB")) / LOCK_BYTES_PER_S + 3 * (repeats + 1) * products * product_s
    )


def ttft_s(words: Words, rates: Rates) -> float:
    """Every prefill, load and generated token of `TtftBenchmark.measure`, for each context."""
    model, repeats = words.get("--shape", "llama-3.1-8b"), int(words.get("--repeats", "5"))
    total = START_S + bytes_of(words.get("--host", "32GiB")) / LOCK_BYTES_PER_S
    for context in map(int, words["--contexts"].split(",")):
        prompts = 2 + int(1.5 * 16 * 256 / context)  # of the disk arm
        whole, loads = 2 + repeats + max(2, repeats // 2) + 2 * prompts, repeats + 0.0
        calls = whole + loads + max(repeats, prompts)
        if "--no-splits" not in words:  # each stores its share; then it is computed whole once, and its rest each time
            whole += sum(share + 1 + repeats * (1 - share) for share in (0.25, 0.5, 0.75))
            loads, calls = loads + 1.5 * repeats, calls + 3 * repeats + 6
        if "--no-decode" not in words:
            whole, loads, calls = whole + 1 + repeats, loads + repeats, calls + 2 * repeats + 17
        moved = context * rates.bytes_per_token(model)
        total += whole * rates.prefill_s(model, context) + calls * 4 * STEP_S
        total += loads * moved / (LINK_SHARE * rates.rate("link_bytes_per_s"))
        total += (prompts + max(repeats, prompts)) * moved / DRIVE_BYTES_PER_S
    return total


def turns_s(words: Words, rates: Rates) -> float:
    """For each number of users and each of three arms, the longer of arriving and of computing."""
    rounds, rate, history = int(words["--rounds"]), float(words["--rate"]), int(words["--history"])
    tokens = int(words.get("--system", "1000")) + history + 200 * rounds // 2
    prefill_s = rates.prefill_s(words.get("--shape", "llama-3.1-8b"), tokens)
    answer_s = 100 * STEP_S
    users = [int(word) for word in words["--users"].split(",")]
    arms_s = [max(rounds / rate, rounds * (count * prefill_s + answer_s)) + answer_s for count in users]
    return START_S + 3 * sum(arms_s)


def vllm_s(words: Words, rates: Rates) -> float:
    """Engine starts, and every prompt that is computed, with LMCache among the arms."""
    sizes, model = GPU, "llama-3.1-8b"
    prompt_s = rates.prefill_s(model, sizes.prompt_tokens)
    checkpoint_s = 2 * 14e9 / DRIVE_BYTES_PER_S  # written and read
    if words["--part"] == "talk":
        # All conversations are computed once; at worst each turn is, too.
        talk_s = sum(
            sizes.conversations * rates.prefill_s(model, sizes.first_tokens + turn * sizes.turn_tokens)
            for turn in range(sizes.turns)
        )
        runs = 5 * sizes.talks
        return START_S + checkpoint_s + runs * (ENGINE_START_S + talk_s + sizes.turns * sizes.answer_tokens * STEP_S)
    if words["--part"] == "ttft":
        return START_S + checkpoint_s + 7 * ENGINE_START_S + 4 * sizes.prompts * prompt_s
    # Two engines of each arm that stores for damage, one for salt; stores are waited for.
    engines = 3 * (2 if words["--part"] == "damaged" else 1)
    return START_S + checkpoint_s + engines * (ENGINE_START_S + 2 * prompt_s)


def bytes_of(text: str) -> int:
    """Bytes of a size such as ``64GiB``."""
    from kvtier.config.value_types import parse_size  # noqa: PLC0415

    return parse_size(text)


# The plug-ins of the project's settings may be missing, and a test that hangs must leave time for the others.
PYTEST = (
    "-m", "pytest", "-v", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "filterwarnings=", "-o", "timeout=120",
)  # fmt: skip
TTFT = ("bench/ttft.py",)
TURNS = ("bench/multiturn.py",)


def sanitizer(tool: str, *flags: str) -> Slice:
    """The copier's tests under one tool, which serializes; tests of what runs at the same time are left out."""
    return Slice(
        f"the copier's tests under compute-sanitizer's {tool}",
        (*PYTEST, "tests/gpu/test_cuda_copies.py", "-k", "not queued and not default_stream"),
        sanitizer_s,
        under=("compute-sanitizer", "--tool", tool, *flags, "--error-exitcode", "9"),
    )


# In the order of their worth: time may end at any of them.
SLICES: dict[str, Slice] = {
    "tests": Slice("tests/gpu: bytes, streams, page locks, restored tokens", (*PYTEST, "tests/gpu"), tests_s),
    "links": Slice("copies, page-locking, a product next to copies", ("bench/links.py", "--lock", "64GiB"), links_s),
    "ttft-8b-32k": Slice(
        "TTFT of Llama-3.1-8B, 1K to 32K",
        (*TTFT, "--contexts", "1024,2048,4096,8192,16384,32768", "--disk", "24GiB", "--host", "40GiB"),
        ttft_s,
    ),
    # Errors of calls are left out: torch's start looks for functions that a driver may lack, which is no error.
    "sanitizer-memcheck": sanitizer("memcheck", "--report-api-errors", "no"),
    "ttft-8b-64k": Slice(
        "TTFT of Llama-3.1-8B, 64K",
        (*TTFT, "--contexts", "65536", "--disk", "30GiB", "--host", "48GiB", "--no-decode"),
        ttft_s,
    ),
    "ttft-8b-128k": Slice(
        "TTFT of Llama-3.1-8B, 128K",
        (*TTFT, "--contexts", "131072", "--disk", "40GiB", "--host", "64GiB", "--no-decode", "--no-splits"),
        ttft_s,
    ),
    "ttft-qwen3": Slice(
        "TTFT of Qwen3-8B",
        (*TTFT, "--shape", "qwen3-8b", "--contexts", "1024,8192,32768", "--disk", "24GiB"),
        ttft_s,
    ),
    "ttft-mla": Slice(
        "TTFT of DeepSeek-V2-Lite",
        (*TTFT, "--shape", "deepseek-v2-lite", "--contexts", "1024,8192,32768", "--disk", "24GiB"),
        ttft_s,
    ),
    **{
        f"vllm-{part}": Slice(
            what, (*VLLM, "--device", "cuda", "--part", part), vllm_s, modules=("vllm",), wheels=VLLM_WHEELS
        )
        for part, what in (
            ("ttft", "vLLM: a miss, from host memory, from disk"),
            ("talk", "vLLM: growing conversations"),
            ("damaged", "vLLM: damaged files"),
            ("salt", "vLLM: a prompt under another salt"),
        )
    },
    # 5,500 tokens of each user, 0.7 GB, as in LMBenchmark; nine fit on the device, a few more in host memory.
    "turns-8b-4k": Slice(
        "conversations of 5,500 tokens",
        (
            *TURNS, "--users", "2,6,12,20", "--rounds", "4", "--history", "4000", "--rate", "0.2",
            "--kv-budget", "6GiB", "--host", "8GiB", "--disk", "24GiB",
        ),
        turns_s,
    ),
    # 21,000 tokens of each user, 2.8 GB, as Samsung's; six fit on the device, and six in host memory.
    "turns-8b-20k": Slice(
        "conversations of 21,000 tokens",
        (
            *TURNS, "--users", "2,4,8,12", "--rounds", "3", "--history", "20000", "--rate", "0.1",
            "--kv-budget", "17GiB", "--host", "18GiB", "--disk", "40GiB",
        ),
        turns_s,
    ),
    "ttft-gpt-oss": Slice(
        "TTFT of gpt-oss-20b",
        (*TTFT, "--shape", "gpt-oss-20b", "--contexts", "1024,8192", "--disk", "16GiB", "--no-decode"),
        ttft_s,
    ),
}  # fmt: skip


SMALL_LINKS = (
    "--lock", "64MiB", "--order", "64", "--products", "20", "--repeats", "1", "--link-chunks", "2",
)  # fmt: skip
SMALL_TTFT = ("--chunk-tokens", "16", "--host", "16MiB", "--disk", "64MiB", "--link-chunks", "2")


def none_s(_words: Words, _rates: Rates) -> float:
    """A quick slice takes seconds."""
    return 15.0


QUICK: dict[str, Slice] = {
    "tests": SLICES["tests"],
    "sanitizer": SLICES["sanitizer-memcheck"],
    "links": Slice(
        SLICES["links"].what,
        ("bench/links.py", "--device", "cpu", *SMALL_LINKS),
        none_s,
    ),
    "ttft": Slice(
        "TTFT of a tiny model",
        (
            *TTFT, "--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--contexts", "64,256", "--repeats", "2",
            *SMALL_TTFT,
        ),
        none_s,
    ),
    "turns": Slice(
        "conversations with a tiny model",
        (
            *TURNS, "--quick", "--shape", "tiny", "--users", "1,3", "--rounds", "2", "--system", "32",
            "--history", "96", "--question", "8", "--answer", "4", "--rate", "0", "--kv-budget", "260KiB",
            "--host", "1MiB", "--disk", "16MiB", "--chunk-tokens", "16",
        ),
        none_s,
    ),
    "vllm": Slice(
        "vLLM: damaged files and salt",
        (*VLLM, "--quick", "--part", "damaged", "--part", "salt"),
        none_s,
        modules=("vllm",),
    ),
}  # fmt: skip
"""The same programs on the CPU with a tiny model, as a smoke test."""

SIMULATOR = ("tests/simulated_cuda/__main__.py",)
"""Runs a program like the interpreter, with a simulated device behind torch."""

SIMULATED: dict[str, Slice] = {
    name: Slice(SLICES[name].what, (*SIMULATOR, *program), none_s)
    for name, program in (
        ("tests", SLICES["tests"].program),
        ("links", ("bench/links.py", *SMALL_LINKS)),
        (
            "ttft-8b-32k",
            (
                *TTFT, "--shape", "tiny", "--contexts", "1024", "--repeats", "1", "--chunk-tokens", "128",
                "--host", "16MiB", "--disk", "64MiB", "--link-chunks", "1",
            ),
        ),
    )
}  # fmt: skip
"""The first slices with a tiny model and a tenth of a gigabyte, on a simulated CUDA device: the dry run."""
