"""Who is contacted and who gets the token: only a host that the user named in this process.

A cache names its source. Whoever made the cache chose that name, so a verb that looks at a cache asks nobody.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import msgspec
import pytest
from tests.cli.running import Ran, run, run_process, story
from tests.helpers.cache_files import chunk_path, constants_path, recipe_path
from tests.hub.data_sets import README, shard
from tests.hub.server import HubServer, Status
from tests.sources.recipes import TextRecipe

import forebay as fb
from forebay.errors import SourceInvalid, SourceNotFound, SourceUnreadable
from forebay.hub import HubFile, Repository, RetryPolicy, download
from forebay.kinds import reopen_recipe, reopen_source
from forebay.recipe import RecipeDocument, fields_of
from forebay.source import Part
from forebay.sources import hub_datasets
from forebay.sources.hub_datasets import hub as hub_source
from forebay.sources.hub_datasets import release
from forebay.teachers import T5, TeacherRecipe
from forebay.teachers.align import reopened
from forebay.tokens.vocabulary import gpt2_json

TOKEN = "hf_secret_of_the_user"
FILES = {"README.md": README.encode()} | {
    f"sample/{part}.parquet": shard([story(20 * part + at) for at in range(20)]) for part in range(2)
}


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return TOKEN


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HubServer, Path]]:
    """The hub of a stranger, and a cache that was built from it where this user never was."""
    folder = tmp_path_factory.mktemp("theirs")
    with HubServer() as server, pytest.MonkeyPatch.context() as patch:
        _at_home(patch, folder)
        server.add("org/set", FILES)
        source = hub_source("org/set", "sample", endpoint=server.address, spool=folder / "spool")
        recipe = fb.TokenRecipe(tokenizer="gpt2", sequence_length=64, chunk_rows=8)
        fb.build(folder / "cache", source, recipe, workers=0)
        release()
        yield server, folder / "cache"
        huggingface_hub.utils.close_session()


@pytest.fixture
def stranger(theirs: tuple[HubServer, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The hub that a stranger's cache names; it listens, and remembers who asked."""
    _at_home(monkeypatch, tmp_path)
    server, _ = theirs
    server.requests.clear()
    server.forgive()
    server.token = None
    yield server
    release()


@pytest.fixture
def cache(theirs: tuple[HubServer, Path], stranger: HubServer, tmp_path: Path) -> Path:
    """The stranger's cache, copied by a user whose disk knows nothing of that hub."""
    return shutil.copytree(theirs[1], tmp_path / "cache")


def _at_home(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have all that is kept of a hub in a folder, and ask without a proxy."""
    patch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(folder / "assets"))
    patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name, value in {
        "HF_ASSETS_CACHE": str(folder / "assets"),
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
    }.items():
        patch.setenv(name, value)
    forget_sources()
    huggingface_hub.utils.close_session()


def forget_sources() -> None:
    """What this process has learnt of hubs so far."""
    hub_datasets._data_set.cache_clear()


def as_user(*words: object, code: int = 0, **environment: str) -> Ran:
    """A command of a user with a token, whose own hub is out of reach."""
    own = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": TOKEN, "NO_PROXY": "127.0.0.1"}
    return run_process(*words, code=code, env={**os.environ, **own, **environment})


def damage(cache: Path) -> Path:
    chunk = chunk_path(cache, "tokens", 0)
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"\x00")
    return chunk


LOOKING = [
    (["status"], 0),
    (["verify"], 0),
    (["verify", "--full"], 0),
    (["peek"], 0),
    (["info"], 0),
    (["clean"], 0),
    (["build"], 1),
    (["build", "--dry-run"], 1),
    (["estimate"], 1),
    (["update", "hub:org/set"], 2),
]


@pytest.mark.parametrize(("words", "code"), LOOKING)
def test_no_verb_contacts_a_host_that_only_a_cache_names(stranger, cache, token, words, code):
    verb, *rest = words
    ran = run(verb, cache, *rest, code=code)
    assert stranger.requests == []
    if verb in ("status", "verify"):
        note = f"the source 'hub:org/set at {stranger.address}' was not checked; pass --allow-network"
        assert ran.out.count(note) == 1
    if code == 1:
        assert f"forebay {verb} {cache} --allow-network" in ran.err
        assert ran.err.count("\n") == 2
    if verb == "update":
        assert f"HF_ENDPOINT={stranger.address}" in ran.err


def test_a_repair_that_needs_the_remote_source_says_so_and_asks_nobody(stranger, cache, token):
    before = damage(cache).read_bytes()
    ran = run("repair", cache, "--workers", 0, code=1)
    assert f"forebay repair {cache} --allow-network" in ran.out
    assert stranger.requests == []
    run("repair", cache, "--workers", 0, "--allow-network")
    assert (chunk_path(cache, "tokens", 0)).read_bytes() != before
    assert stranger.requests
    assert {request.authorization for request in stranger.requests} == {None}


@pytest.mark.parametrize("words", [["status"], ["verify", "--full"], ["build", "--workers", 0]])
def test_who_allows_it_contacts_that_host_without_a_token(stranger, cache, token, words):
    verb, *rest = words
    ran = run(verb, cache, *rest, "--allow-network")
    assert "not checked" not in ran.out
    assert stranger.requests
    assert {request.authorization for request in stranger.requests} == {None}


@pytest.mark.slow
def test_an_endpoint_of_the_user_gets_the_token_also_from_a_cache(stranger, cache):
    stranger.token = TOKEN
    as_user("status", cache, "--allow-network", HF_ENDPOINT=stranger.address)
    assert {request.authorization for request in stranger.requests} == {f"Bearer {TOKEN}"}
    as_user("update", cache, "hub:org/set", "--workers", 0, HF_ENDPOINT=stranger.address)


def test_the_same_holds_in_python(stranger, cache, token):
    assert not fb.status(cache).source_checked
    assert "allow_network=True" in fb.verify(cache).source_note
    damage(cache)
    (failed,) = fb.repair(cache, workers=0).failed.values()
    assert "--allow-network" in failed
    assert stranger.requests == []
    assert fb.status(cache, allow_network=True).source_checked
    assert not fb.repair(cache, workers=0, allow_network=True).failed
    assert {request.authorization for request in stranger.requests} == {None}


def test_a_source_that_is_passed_is_named(stranger, token, tmp_path):
    source = hub_source("org/set", "sample", endpoint=stranger.address, spool=tmp_path / "spool")
    fb.build(tmp_path / "cache", source, TextRecipe(), workers=0)
    assert fb.status(tmp_path / "cache", source=source).source_checked
    assert {request.authorization for request in stranger.requests} == {f"Bearer {token}"}


def test_a_hub_that_lost_the_data_set_does_not_fail_a_sound_cache(stranger, cache):
    stranger.spoil("", *[Status(404)] * 100)
    ran = run("status", cache, "--allow-network")
    assert "the source was not checked: it could not be reached" in ran.out
    run("verify", cache, "--allow-network")


def test_a_token_is_not_sent_in_clear_text(token, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(SourceNotFound, match="your token would be sent in clear text\nhint: use https://"):
        Repository("org/set", endpoint="http://mirror.invalid", patience=RetryPolicy(retries=0, timeout=1)).commit()
    huggingface_hub.utils.close_session()


def test_token_follows_no_redirect_and_no_address_of_a_storage_service(hub, token, tmp_path):
    """A listing that redirects, and metadata that names another host for the token of Xet."""
    commit = hub.add("org/set", {"a.parquet": b"x"})
    owner = Repository("org/set", "dataset", hub.address, str(tmp_path), RetryPolicy(retries=0, timeout=5))
    listed = owner.files(commit)[0]
    usual = hub.answer
    with HubServer() as other:
        xet = {"X-Xet-Hash": "a" * 64, "X-Xet-Refresh-Route": f"{other.address}/api/datasets/org/set/xet-read-token/x"}
        elsewhere = 302, {"Location": f"{other.address}/api/datasets/org/set/tree/x"}, b""
        hub.answer = lambda path, query: (
            elsewhere if "/tree/" in path else (200, {**usual(path, query)[1], **xet}, b"x")
        )
        with pytest.raises(SourceNotFound):
            owner.files("b" * 40)
        with pytest.raises(SourceNotFound):
            download(HubFile(owner, commit, listed), str(tmp_path / "spool"))
        assert len(other.requests) == 2
        assert {request.authorization for request in other.requests} == {None}
        assert {request.authorization for request in hub.requests} == {f"Bearer {token}"}


def test_a_description_from_a_plan_is_checked(stranger):
    good = hub_source("org/set", "sample", endpoint=stranger.address).describe()
    assert reopen_source(good).describe() == good
    for wrong in ({"revision": "../../etc"}, {"revision": "main"}, {"name": 5}, {"endpoint": ["x"]}, {"split": None}):
        with pytest.raises(SourceInvalid, match=r"the source in the plan \(kind 'hub'\) cannot be opened"):
            reopen_source({**good, **wrong})
    with pytest.raises(SourceInvalid):
        reopen_source({"kind": "hub"})


@pytest.mark.parametrize("wrong", [{"path": "../x.parquet"}, {"path": "/x.parquet"}, {"etag": "../x"}, {"size": -1}])
def test_a_shard_from_a_plan_is_checked_before_it_is_downloaded(stranger, tmp_path, wrong):
    source = hub_source("org/set", "sample", endpoint=stranger.address, spool=tmp_path / "spool")
    file = msgspec.structs.replace(source.files()[0], **wrong)
    stranger.requests.clear()
    for preview in (False, True):
        with pytest.raises(SourceUnreadable, match="its name, size or hash in the plan is invalid"):
            list(source.read(Part(file, 0, 1), preview=preview))
    assert stranger.requests == []


@pytest.mark.parametrize("endpoint", ["file:///etc/passwd", "ftp://host", "http://user:secret@host", "http://", "x"])
def test_an_endpoint_that_is_not_an_address_is_refused(hub, endpoint):
    with pytest.raises(SourceNotFound, match="is not an address"):
        Repository("org/set", endpoint=endpoint).files("a" * 40)
    assert hub.requests == []


def foreign_tokenizer(tmp_path: Path) -> Path:
    """A cache of local lines whose recipe names a tokenizer on the hub, and that has lost its constants."""
    (tmp_path / "data.txt").write_text("".join(f"{story(number)}\n" for number in range(20)))
    root = tmp_path / "named"
    recipe = fb.TokenRecipe(tokenizer="gpt2", sequence_length=64, chunk_rows=8)
    fb.build(root, fb.sources.lines(str(tmp_path / "data.txt")), recipe, workers=0)
    constants = constants_path(root, "tokens")
    replace_text(recipe_path(root, "tokens"), '"tokenizer": "gpt2"', '"tokenizer": "evil/probe"')
    shutil.rmtree(root / "generations")
    constants.unlink()
    return root


def replace_text(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.slow
@pytest.mark.parametrize("words", [["build"], ["build", "--dry-run"], ["estimate"], ["update", "data.txt"]])
def test_tokenizer_that_only_a_cache_names_is_fetched_only_with_permission(hub, tmp_path, words):
    root, (verb, *rest) = foreign_tokenizer(tmp_path), words
    rest = [tmp_path / word if word == "data.txt" else word for word in rest]
    hub.add("evil/probe", {"tokenizer.json": gpt2_json()}, "models")
    ran = as_user(verb, root, *rest, code=1, HF_ENDPOINT=hub.address)
    assert "needs 'evil/probe' from the hub" in ran.err
    assert f"`forebay {verb} {root} --allow-network`" in ran.err
    assert hub.requests == []
    if verb == "update" or words == ["build"]:
        as_user(verb, root, *rest, "--allow-network", "--workers", 0, HF_ENDPOINT=hub.address)
        assert hub.asked("tokenizer.json")


@pytest.mark.slow
def test_a_repair_fetches_a_lost_tokenizer_only_where_the_user_allows_it(hub, tmp_path):
    (tmp_path / "data.txt").write_text("".join(f"{story(number)}\n" for number in range(20)))
    hub.add("org/model", {"tokenizer.json": gpt2_json()}, "models")
    root = tmp_path / "cache"
    words = ["--into", root, "--workers", 0, "--tokenizer", "org/model"]
    as_user("build", "tokens", tmp_path / "data.txt", *words, HF_ENDPOINT=hub.address)
    constants = constants_path(root, "tokens")
    before = constants.read_bytes()
    constants.unlink()
    hub.requests.clear()
    ran = as_user("repair", root, code=1, HF_ENDPOINT=hub.address)
    assert f"forebayrepair{root}--allow-network" in "".join(ran.out.split())  # a long path may be wrapped
    assert hub.requests == []
    as_user("repair", root, "--allow-network", HF_ENDPOINT=hub.address)
    assert constants.read_bytes() == before


def test_a_model_that_only_the_layer_of_a_teacher_names_is_not_fetched(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", hub.address)
    recipe = TeacherRecipe(teacher=T5(model="evil/probe"))
    kept = RecipeDocument(
        format_version=1,
        layer="t5",
        kind="teacher",
        revision=1,
        fingerprint="0" * 32,
        fields=fields_of(recipe),
        dependencies={},
        reads=(),
        sample_ids="",
        columns=(),
    )
    with pytest.raises(
        SourceInvalid, match=r"(?s)'t5' of '/c' needs 'evil/probe'.*`forebay repair /c --allow-network`"
    ):
        reopen_recipe(kept, None, root="/c")
    with pytest.raises(SourceInvalid, match="`forebay build teachers /c --allow-network`"):
        reopened(kept, "/c", "build teachers", False)
    (tmp_path / "evil" / "probe").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert recipe.on_hub() == ()
    assert hub.requests == []
