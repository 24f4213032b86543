"""Settings from flags, environment and file: which one wins, and what is said about wrong ones."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.schema import ChildSpec, Config
from config.sources import ConfigError, Option, build_parser, options, read_settings, sections

MODEL = ["--model", "m"]


def read(*argv: str, **environ: str) -> Config:
    return read_settings([*MODEL, *argv], environ, "0").config


def message(*argv: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(*argv, **environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def toml(folder: Path, text: str) -> str:
    path = folder / "settings.toml"
    path.write_text(text)
    return str(path)


def test_nothing_given_is_the_defaults_of_the_structs() -> None:
    assert msgspec.structs.replace(read().model, model="") == Config().model
    for section in set(sections()) - {"model"}:
        assert getattr(read(), section) == getattr(Config(), section)


def test_flags_win_over_the_environment_which_wins_over_the_file(tmp_path: Path) -> None:
    file = toml(
        tmp_path, '[model]\ndtype = "float32"\n[scheduler]\nmax_seqs = 1\nblock_size = 8\n[server]\nport = 1111\n'
    )
    config = read("--config", file, "--max-seqs", "3", TOKENMILL_MAX_SEQS="2", TOKENMILL_BLOCK_SIZE="4")
    assert config.scheduler.max_seqs == 3
    assert config.scheduler.block_size == 4
    assert config.server.port == 1111
    assert config.model.dtype == "float32"


def test_a_setting_is_given_by_whichever_source_says_it_be_it_the_default(tmp_path: Path) -> None:
    file = toml(tmp_path, '[scheduler]\nprefer = "mixed"\n')
    settings = read_settings([*MODEL, "--config", file, "--prefix-cache"], {"TOKENMILL_PORT": "8000"}, "0")
    assert settings.given == {"model", "prefer", "prefix_cache", "port"}
    assert read_settings(MODEL, {}, "0").given == {"model"}


def test_the_file_may_be_named_in_the_environment_and_write_keys_with_dashes(tmp_path: Path) -> None:
    file = toml(tmp_path, '[scheduler]\nmax-seqs = 5\nprefix-cache = false\n[model]\nserved-model-name = ["a", "b"]\n')
    config = read(TOKENMILL_CONFIG=file)
    assert config.scheduler.max_seqs == 5
    assert config.scheduler.prefix_cache is False
    assert config.model.served_model_name == ("a", "b")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[scheduler]\nmax_seq = 3\n", "unknown key scheduler.max_seq; did you mean scheduler.max_seqs?"),
        ("[schedular]\nmax_seqs = 3\n", "unknown section or key 'schedular'; did you mean scheduler?"),
        ("max_seqs = 3\n", "unknown section or key 'max_seqs'; it belongs into a section: scheduler.max_seqs"),
        ("[server]\nport = 70000\n", "server.port: must be a whole number from 0 to 65535, not 70000"),
        ("[server]\nport = true\n", "server.port: must be a whole number from 0 to 65535, not True"),
        ("[server\n", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_told_by_key(tmp_path: Path, text: str, said: str) -> None:
    file = toml(tmp_path, text)
    assert said in message("--config", file)
    assert file in message("--config", file)


def test_a_missing_file_is_told() -> None:
    assert message("--config", "no/such.toml") == "--config no/such.toml: No such file or directory"


def test_switches_have_both_forms_and_words_in_the_environment() -> None:
    assert read("--no-prefix-cache").scheduler.prefix_cache is False
    assert read("--prefix-cache", TOKENMILL_PREFIX_CACHE="no").scheduler.prefix_cache is True
    assert read(TOKENMILL_PREFIX_CACHE="off").scheduler.prefix_cache is False
    assert read(TOKENMILL_DETERMINISTIC="1").worker.deterministic is True
    assert message(TOKENMILL_PREFIX_CACHE="perhaps") == "TOKENMILL_PREFIX_CACHE: must be true or false, not 'perhaps'"


def test_lists_are_separated_by_commas() -> None:
    assert read("--served-model-name", "a, b,c").model.served_model_name == ("a", "b", "c")
    assert "--served-model-name: must be a list of texts" in message("--served-model-name", "a,,b")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--max-seqs", "0"], "--max-seqs: must be a whole number from 1 to 4096, not '0'"),
        (["--max-seqs", "4097"], "--max-seqs: must be a whole number from 1 to 4096, not '4097'"),
        (["--tp", "two"], "--tp: must be a whole number from 1 to 64, not 'two'"),
        (["--ready-timeout", "nan"], "--ready-timeout: must be a number of at least 1, not 'nan'"),
        (["--ready-timeout", "inf"], "--ready-timeout: must be a number of at least 1, not 'inf'"),
        (["--dtype", "fp32"], "--dtype: must be one of auto, float32, bfloat16, float16, not 'fp32'"),
        (["--max-seq", "3"], "unknown argument --max-seq; did you mean --max-seqs?"),
        (["--prefil-chunk=3"], "unknown argument --prefil-chunk; did you mean --prefill-chunk?"),
        (["--host"], "argument --host: expected one argument"),
    ],
)
def test_a_wrong_flag_is_told_with_what_is_allowed(argv: list[str], said: str) -> None:
    assert message(*argv) == said


@pytest.mark.parametrize("prefix", ["", "a b", "1x", "a:b", "\u00e9", "x{", "x\n", "x" * 65], ids=ascii)
def test_a_prefix_that_no_metric_can_have_is_told_at_once(prefix: str) -> None:
    assert message("--metrics-prefix", prefix).startswith("--metrics-prefix: must be a text that matches ^[a-zA-Z_]")
    assert message(TOKENMILL_METRICS_PREFIX=prefix).startswith("TOKENMILL_METRICS_PREFIX: must be")


@pytest.mark.parametrize(
    "option", [option for option in options() if option.kind is str], ids=lambda option: option.name
)
def test_bytes_that_are_not_utf_8_are_told(option: Option) -> None:
    assert message(option.flag, "/tmp/\udcff").startswith(f"{option.flag}: must be UTF-8")
    assert message(**{option.variable: "/tmp/\udcff"}).startswith(f"{option.variable}: must be UTF-8")


def test_a_missing_model_is_told() -> None:
    with pytest.raises(ConfigError, match=r"^--model is missing"):
        read_settings([], {}, "0")
    assert read_settings([], {"TOKENMILL_MODEL": "m"}, "0").config.model.model == "m"


def test_a_misspelt_variable_is_warned_of_and_foreign_ones_are_not() -> None:
    settings = read_settings(MODEL, {"TOKENMILL_MAX_SEQ": "3", "TOKENMILL_TORCH_INDEX": "x", "PATH": "y"}, "0")
    assert settings.warnings == (
        "the environment variable TOKENMILL_MAX_SEQ is not a setting; did you mean TOKENMILL_MAX_SEQS?",
    )


@pytest.mark.parametrize("name", ["PLAN", "PLAN_GPU"])
def test_what_is_for_the_command_line_only_is_warned_of_in_the_environment(name: str) -> None:
    settings = read_settings(MODEL, {f"TOKENMILL_{name}": "H100"}, "0")
    assert (settings.plan, settings.plan_gpu) == (False, None)
    flag = "--" + name.lower().replace("_", "-")
    assert settings.warnings == (
        f"the environment variable TOKENMILL_{name} is not a setting: {flag} is for the command line only",
    )


def test_help_names_every_flag_with_its_variable_and_description(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read_settings(["--help"], {}, "0")
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("python -m launch --model") >= 4  # usage and three examples
    for option in options():
        assert f"{option.flag} " in text or f"{option.flag}," in text
        # A long name may be broken at its dashes by the line width, a variable cannot.
        assert option.variable in text
        assert option.meta.description


def test_a_gpu_is_planned_for_with_plan_only() -> None:
    settings = read_settings([*MODEL, "--plan", "--plan-gpu", "RTX 4090"], {}, "0")
    assert settings.plan_gpu is not None
    assert settings.plan_gpu.name == "RTX4090"
    assert read_settings([*MODEL, "--plan"], {}, "0").plan_gpu is None
    assert message("--plan-gpu", "24GiB").startswith("--plan-gpu: only with --plan")
    assert message("--plan", "--plan-gpu", "24GiB", "--device", "cpu") == "--plan-gpu: not with --device cpu"
    assert message("--plan", "--plan-gpu", "big").startswith("--plan-gpu: 'big' is neither a memory size such as 24GiB")
    assert message("--plan-gp", "24GiB") == "unknown argument --plan-gp; did you mean --plan-gpu?"


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read_settings(["--version"], {}, "1.2.3")
    assert ended.value.code == 0
    assert capsys.readouterr().out == "tokenmill 1.2.3\n"


def test_no_two_settings_share_a_name() -> None:
    names = [option.name for option in options()]
    assert len(set(names)) == len(names)
    build_parser("0")  # argparse refuses a flag given twice


def a_value(option: Option) -> st.SearchStrategy[object]:
    low = option.meta.ge
    high = option.meta.le
    if option.choices:
        return st.sampled_from(option.choices)
    if option.kind is bool:
        return st.booleans()
    if option.kind is int:
        return st.integers(None if low is None else int(low), None if high is None else int(high))
    if option.kind is float:
        return st.floats(low, high, allow_nan=False, allow_infinity=False)
    text = st.from_regex(option.meta.pattern or r"[a-z0-9./]{1,12}", fullmatch=True)
    return st.lists(text, min_size=1, max_size=3).map(tuple) if option.many else text


@given(st.data())
def test_every_allowed_value_reads_the_same_from_a_flag_and_from_the_environment(data: st.DataObject) -> None:
    option = data.draw(st.sampled_from([option for option in options() if option.name != "model"]))
    value = data.draw(a_value(option))
    text = ",".join(value) if isinstance(value, tuple) else str(value)
    if option.kind is bool:
        argv = [option.flag if value else option.flag.replace("--", "--no-", 1)]
    else:
        argv = [f"{option.flag}={text}"]
    by_flag, by_variable = read(*argv), read(**{option.variable: text})
    assert getattr(getattr(by_flag, option.section), option.name) == value
    assert by_flag == by_variable


def test_a_child_specification_survives_its_file() -> None:
    decoder = msgspec.json.Decoder(Config)
    config = read("--max-model-len", "100", "--served-model-name", "a,b", "--threads", "2")
    assert decoder.decode(msgspec.json.encode(config)) == config
    msgspec.json.Decoder(ChildSpec)  # refuses bounds on types that have none
