from pathlib import Path

import pytest

from strata_coord.coordinator.config import Config, config_schema_text, load_config, parse_config
from strata_coord.coordinator.config_checks import GRID_TOKENS
from strata_coord.ipc.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SMALL = '[model]\npath = "a.gguf"\n'


def errors(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, name="my.toml", folder=Path("/models"), overrides=overrides)
    return str(caught.value).splitlines()


def good(text: str, *overrides: str) -> Config:
    return parse_config(text, name="my.toml", folder=Path("/models"), overrides=overrides)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_every_shipped_configuration_loads_and_names_its_schema(path):
    config = load_config(path)
    assert len(config.stage) == len(config.split.boundaries) + 1
    assert path.read_text().splitlines()[0] == "#:schema ./strata-coord.schema.json"


def test_the_shipped_schema_is_current():
    # To renew it: write config_schema_text() to configs/strata-coord.schema.json.
    assert (CONFIGS / "strata-coord.schema.json").read_text() == config_schema_text()


def test_every_key_of_the_schema_is_described():
    for name, table in Config.model_fields.items():
        fields = getattr(table.annotation, "model_fields", {})
        for key, field in fields.items():
            assert field.description, f"{name}.{key}"


def test_all_errors_are_reported_at_once_with_their_lines():
    text = """[model]
path = "a.gguf"
[prefill]
mode = "layermajor"
super_chunk_token = 5
sub_chunk_tokens = 100
[memory]
arena_gib = "four"
pin = true
[prefil]
"""
    assert errors(text) == [
        "my.toml:4: prefill.mode: expected 'auto', 'layer-major' or 'chunk-major', got 'layermajor'; "
        'did you mean "layer-major"?',
        'my.toml:5: prefill.super_chunk_token: unknown key; did you mean "super_chunk_tokens"?',
        "my.toml:6: prefill.sub_chunk_tokens: expected a multiple of 64, got 100; the nearest is 128",
        "my.toml:8: memory.arena_gib: expected a number or 'auto', got 'four'",
        "my.toml:9: memory.pin: true is not available in this version; use false, or leave it out",
        'my.toml:10: prefil: unknown table; did you mean "prefill"?',
    ]


def test_a_line_is_found_in_the_right_stage():
    text = SMALL + "[split]\nboundaries = [4]\n[[stage]]\ncpu_threads = 1\n[[stage]]\ncpu_threads = 0\n"
    assert errors(text) == [
        "my.toml:8: stage.1.cpu_threads: expected a value greater than or equal to 1 or 'auto', got 0"
    ]


def test_dotted_keys_and_inline_tables_have_lines_too():
    assert errors('model.path = "a"\nkv.max_sequences = 0\n')[0].startswith("my.toml:2: kv.max_sequences: ")
    assert errors('model = { path = "a" }\nkv = { max_sequences = 0 }\n')[0].startswith("my.toml:2: ")


def test_a_key_inside_a_multi_line_string_is_not_mistaken_for_the_key():
    text = 'model.path = """\n[kv]\nmax_sequences = 1\n"""\n[kv]\nmax_sequences = 0\n'
    assert errors(text)[0].startswith("my.toml:6: kv.max_sequences: ")


def test_a_missing_table_is_an_error_without_a_line():
    assert errors("") == ["my.toml: model: missing, and it has no default"]


def test_broken_toml_names_the_line():
    (line,) = errors("[model\n")
    assert line.startswith("my.toml: not valid TOML: ")
    assert "line 1" in line


def test_a_word_is_not_taken_for_a_number_nor_true_for_one():
    text = SMALL + '[kv]\nmax_sequences = "2"\n[prefill]\nhand_off_slots = true\n'
    assert errors(text) == [
        "my.toml:4: kv.max_sequences: expected an integer, got '2'",
        "my.toml:6: prefill.hand_off_slots: expected an integer or 'auto', got True",
    ]


@pytest.mark.parametrize(
    ("table", "line", "key"),
    [
        ("split", 'boundaries = "auto"', "split.boundaries"),
        ("split", "prompt_tokens = 8192", "split.prompt_tokens"),
        ("split", "decode_weight = 0.5", "split.decode_weight"),
        ("model", 'compute_dtype = "fp16"', "model.compute_dtype"),
        ("prefill", 'rows = "host"', "prefill.rows"),
        ("memory", "direct_io = true", "memory.direct_io"),
        ("memory", 'expert_profile = "p"', "memory.expert_profile"),
        ("memory", "snapshot_gib = 1", "memory.snapshot_gib"),
        ("memory", 'mirrors = ["/x"]', "memory.mirrors"),
        ("decode", 'draft = "mtp"', "decode.draft"),
        ("serve", 'host = "127.0.0.1"', "serve.host"),
        ("serve", "port = 80", "serve.port"),
        ("serve", 'api_key_file = "k"', "serve.api_key_file"),
        ("supervision", "restarts_per_10_min = 3", "supervision.restarts_per_10_min"),
        ("hosts", 'keys_file = "k"', "hosts.keys_file"),
        ("[stage]", 'node = "other"', "stage.0.node"),
        ("[stage]", "link_limit_gb_per_s = 6.6", "stage.0.link_limit_gb_per_s"),
    ],
)
def test_a_key_whose_feature_comes_later_is_refused_by_name(table, line, key):
    head = '[model]\npath = "a"\n' if table != "model" else '[model]\npath = "a"\n' + line + "\n"
    text = head if table == "model" else f"{head}[{table}]\n{line}\n"
    found = [one for one in errors(text) if f": {key}: " in one]
    assert len(found) == 1
    assert "is not available in this version" in found[0]
    assert found[0].startswith(f"my.toml:{text.splitlines().index(line) + 1}: ")


@pytest.mark.parametrize("kv_dtype", ["fp32", "fp16", "bf16", "int8"])
def test_every_type_of_keys_and_values_may_be_chosen(kv_dtype):
    assert good(f'[model]\npath = "a"\n[kv]\ndtype = "{kv_dtype}"\n').kv.dtype == kv_dtype


def test_settings_that_ask_for_nothing_new_are_accepted():
    config = good(
        SMALL
        + '[memory]\npin = false\ndirect_io = false\nmirrors = []\n[prefill]\nrows = "vram"\n'
        "[model2]\n".replace("[model2]\n", "")
        + '[decode]\ndraft = "off"\n'
    )
    assert config.memory.pin is False


def test_boundaries_and_stages_must_agree():
    text = SMALL + "[split]\nboundaries = [8, 8]\n[[stage]]\n[[stage]]\n"
    assert errors(text) == [
        "my.toml:4: split.boundaries: 2 boundaries make 3 stages, but the file has 2 [[stage]]",
        "my.toml:4: split.boundaries: expected rising layers, got [8, 8]",
    ]


def test_sizes_that_contradict_each_other_are_refused():
    text = SMALL + "[prefill]\nsub_chunk_tokens = 256\nslot_rows = 320\nsuper_chunk_tokens = 128\n"
    assert errors(text) == [
        "my.toml:5: prefill.slot_rows: expected a multiple of sub_chunk_tokens = 256, got 320",
        "my.toml:6: prefill.super_chunk_tokens: 128 is below sub_chunk_tokens = 256",
    ]
    pool = "[model]\npath = 'a'\ncontext_tokens = 100\n[kv]\npool_tokens = 99\n"
    assert errors(pool) == [
        "my.toml:5: kv.pool_tokens: 99 cannot hold one sequence of model.context_tokens = 100"
    ]


def test_overrides_are_toml_values_and_bare_words_are_strings():
    text = SMALL + "[split]\nboundaries = [4]\n[[stage]]\n[[stage]]\n"
    config = good(
        text,
        "prefill.mode=layer-major",
        "stage.1.vram_budget_mib=64",
        "memory.arena_gib=1.5",
        "split.boundaries=[6]",
        "model.path=b.gguf",
    )
    assert config.prefill.mode == "layer-major"
    assert [stage.vram_budget_mib for stage in config.stage] == [None, 64]
    assert config.memory.arena_gib == 1.5
    assert config.split.boundaries == (6,)
    assert config.model.path == "/models/b.gguf"


def test_an_error_from_an_override_names_the_option():
    assert errors(SMALL, "prefill.mode=fast") == [
        "--set prefill.mode=fast: prefill.mode: expected 'auto', 'layer-major' or 'chunk-major', got 'fast'"
    ]
    assert errors(SMALL, "nothing") == [
        "--set nothing: expected table.key=value, for example prefill.mode=layer-major"
    ]
    text = SMALL + "[[stage]]\n"
    assert errors(text, "stage.3.device=cpu") == [
        "--set stage.3.device=cpu: no stage '3': the file has 1, counted from 0"
    ]
    assert errors(SMALL, "model.path.x=1")[0] == "--set model.path.x=1: model.path is not a table"


def test_paths_are_relative_to_the_file_and_builtin_names_are_kept(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text('[model]\npath = "m/a.gguf"\n[log]\nfile = "x.log"\n')
    config = load_config(file)
    assert config.model.path == str(tmp_path / "m/a.gguf")
    assert config.log.file == str(tmp_path / "x.log")
    assert good('[model]\npath = "builtin:split24"\n').model.path == "builtin:split24"


def test_the_model_option_is_relative_to_the_working_directory(tmp_path, monkeypatch):
    file = tmp_path / "a.toml"
    file.write_text('[model]\npath = "m/a.gguf"\n')
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert load_config(file, model="b.gguf").model.path == str(tmp_path / "here" / "b.gguf")
    assert load_config(file, model="builtin:split24").model.path == "builtin:split24"


def test_a_file_that_is_not_there_or_not_text_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read: No such file"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8 text, byte 0"):
        load_config(tmp_path / "bad.toml")


def test_a_configuration_cannot_be_changed():
    with pytest.raises(Exception, match="frozen"):
        good(SMALL).kv.max_sequences = 3


def test_the_grid_is_the_block_of_the_chunked_form():
    assert GRID_TOKENS == 64
