"""The folders of a federation: certificates, permissions, nothing of one node in another's."""

import json
import re
import shutil
import ssl
import stat
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

import numpy as np
import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    load_ssh_private_key,
    load_ssh_public_key,
)

from hushrec.cli import main
from hushrec.data.partition import deal_users
from hushrec.deployment.make import FederationSpec, ServerAddress, make_federation
from hushrec.deployment.node.database import NodeDatabase
from hushrec.deployment.provisioning import Authority, NodeFolder, ServerFolder
from hushrec.errors import ConfigError
from hushrec.federation.contract import Catalogue, Contract
from hushrec.federation.experiment import ExperimentRequest
from hushrec.io.files import write_bytes
from hushrec.secagg.keys import is_signed
from hushrec.testing import taste_world

CENTRAL = ("--set", "privacy.mode=central", "--set", "privacy.epsilon=4")
HOSTS = ("fed.example.org", "10.1.2.3")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "tastes"
    data = taste_world()
    # No name is a part of another.
    data = replace(data, users=np.array([f"person-{k:04d}" for k in range(data.n_users)]))
    contract = Contract(ExperimentRequest("tastes", "pfedrec").experiment(), Catalogue.of(data))
    names = ("ada", "ben", "cleo")
    make_federation(folder, FederationSpec("tastes", contract, names, ServerAddress(HOSTS), data))
    return folder


def init(*words):
    return CliRunner().invoke(main, ["federate", "init", *map(str, words)])


# ------------------------------------------------------------ certificates


def test_the_server_is_signed_by_the_authority_and_for_its_names(made):
    authority = x509.load_pem_x509_certificate((made / "ca" / "ca.crt").read_bytes())
    server = x509.load_pem_x509_certificate((made / "server" / "server.crt").read_bytes())
    server.verify_directly_issued_by(authority)
    authority.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fed.example.org", "localhost"]
    addresses = [ip_address("10.1.2.3"), ip_address("127.0.0.1")]
    assert names.get_values_for_type(x509.IPAddress) == addresses
    for certificate, is_authority in ((authority, True), (server, False)):
        limits = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
        assert limits.critical
        assert limits.value.ca is is_authority
        assert isinstance(certificate.public_key().curve, ec.SECP384R1)
    now = datetime.now(UTC)
    assert timedelta(days=820) < server.not_valid_after_utc - now < timedelta(days=826)
    assert authority.not_valid_after_utc > server.not_valid_after_utc
    assert server.not_valid_before_utc < now


def test_the_key_is_the_certificates(made):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made / "server" / "server.crt", made / "server" / "server.key")
    with pytest.raises(ssl.SSLError):
        context.load_cert_chain(made / "server" / "server.crt", made / "ca" / "ca.key")


def test_a_certificate_can_be_renewed_and_one_that_ran_out_is_refused(made, tmp_path, monkeypatch):
    folder = tmp_path / "copy"
    shutil.copytree(made, folder)
    monkeypatch.setattr("hushrec.deployment.provisioning.SERVER_DAYS", -1 / 48)
    certificate, key = Authority.generate("x").server(HOSTS)
    monkeypatch.undo()
    for name, text in (("server.crt", certificate), ("server.key", key)):
        (folder / "server" / name).unlink()
        write_bytes(folder / "server" / name, text, secret=True)
    with pytest.raises(ConfigError, match=r"server.crt expired on .* renew"):
        ServerFolder.open(folder / "server")
    done = CliRunner().invoke(main, ["federate", "renew", str(folder), "--json"])
    assert done.exit_code == 0, done.output
    ServerFolder.open(folder / "server")
    server = x509.load_pem_x509_certificate((folder / "server" / "server.crt").read_bytes())
    server.verify_directly_issued_by(
        x509.load_pem_x509_certificate((made / "ca" / "ca.crt").read_bytes())
    )
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fed.example.org", "localhost"]
    assert mode(folder / "server" / "server.key") == 0o600


def test_node_keys_are_what_openssh_makes(made):
    for name in ("ada", "ben", "cleo"):
        private = load_ssh_private_key((made / "nodes" / name / "node.key").read_bytes(), None)
        public = load_ssh_public_key((made / "server" / "nodes" / f"{name}.pub").read_bytes())
        assert isinstance(private.curve, ec.SECP384R1)
        assert private.public_key() == public


def test_everybody_knows_everybody_by_identity(made):
    listed = ServerFolder.open(made / "server").identities
    for name in ("ada", "ben", "cleo"):
        folder = NodeFolder.open(made / "nodes" / name)
        assert folder.identities == listed
        signature = folder.identity.sign("test", b"words")
        assert is_signed(listed[name], signature, "test", b"words")
        assert not is_signed(listed["ada" if name != "ada" else "ben"], signature, "test", b"words")


# ------------------------------------------------------------ secrets


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_secrets_are_their_owners_alone(made):
    secret = {"ca.key", "server.key", "node.key", "identity.key", "data.node"}
    found = [path for path in made.rglob("*") if path.name in secret]
    assert len(found) == 2 + 3 * 3
    assert {mode(path) for path in found} == {0o600}
    assert {mode(path) for path in made.rglob("*") if path.is_dir()} == {0o700}


def words(path):
    """All of a folder, as bytes to search in, key by key."""
    return b"".join(file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file())


def secrets_of(made, name):
    """What must be in no other folder: in the forms it is written in, and raw."""
    own = made / "nodes" / name
    private = load_ssh_private_key((own / "node.key").read_bytes(), None)
    number = private.private_numbers().private_value.to_bytes(48, "big")
    yield from (number, NodeFolder.open(own).identity.private)
    for file in ("node.key", "identity.key"):
        # The first and the last line of an OpenSSH key are the same in all of them.
        lines = (own / file).read_bytes().splitlines()[1:-1]
        yield from lines[1:-1] if file == "node.key" else lines
    with NodeDatabase.open(own / "data.node") as store:
        yield store.noise_key.encode()
        yield from (user.encode() for (user,) in store.rows("SELECT name FROM users"))


def test_no_secret_of_a_node_is_in_another_folder(made):
    everything = {path: words(path) for path in (made / "nodes").iterdir()}
    everything[made / "server"] = words(made / "server")
    everything[made / "ca"] = words(made / "ca")
    for name in ("ada", "ben", "cleo"):
        own = made / "nodes" / name
        secrets = list(secrets_of(made, name))
        assert len(secrets) > 10
        assert sum(text in everything[own] for text in secrets) > 10, "the search finds something"
        for path, text in everything.items():
            if path != own:
                assert not [secret for secret in secrets if secret in text], path
    authority = (made / "ca" / "ca.key").read_bytes().splitlines()[2]
    assert [path.name for path, text in everything.items() if authority in text] == ["ca"]


@pytest.mark.parametrize("name", ["node.key", "identity.key", "data.node"])
def test_a_secret_that_others_may_read_is_refused(made, tmp_path, name):
    shutil.copytree(made / "nodes" / "ada", tmp_path / "ada")
    NodeFolder.open(tmp_path / "ada")
    (tmp_path / "ada" / name).chmod(0o640)
    with pytest.raises(ConfigError, match=f"chmod 600 .*{name}"):
        NodeFolder.open(tmp_path / "ada")


def test_a_folder_stands_alone(made, tmp_path):
    shutil.copytree(made / "nodes" / "ben", tmp_path / "moved")
    with NodeDatabase.open(NodeFolder.open(tmp_path / "moved").store) as store:
        assert store.name == "ben"
        assert store.counts()["users"] > 0


# ------------------------------------------------------------ dealing


@pytest.mark.parametrize("how", ["random", "in-order"])
def test_every_user_is_on_exactly_one_node_and_nothing_is_lost(tmp_path, how):
    data = taste_world()
    contract = Contract(ExperimentRequest("tastes", "pfedrec").experiment(), Catalogue.of(data))
    federation = FederationSpec("f", contract, ("a", "b", "c", "d"), data=data, partition=how)
    made = make_federation(tmp_path / "f", federation)
    users, rows = [], []
    server = ServerFolder.open(tmp_path / "f" / "server")
    assert server.config.policy.nodes == 4
    dealt = server.partition
    for name, taken in made.items():
        with NodeDatabase.open(tmp_path / "f" / "nodes" / name / "data.node") as store:
            here = [user for (user,) in store.rows("SELECT name FROM users ORDER BY id")]
            assert taken.users == len(here)
            # The server numbers them as they are in the file, and is told no name.
            assert data.users[dealt[name].users].tolist() == here
            assert (dealt[name].clients == dealt[name].users).all()
            assert taken.unknown_items == 0
            users += here
            rows += store.rows(
                "SELECT name, item, value, time FROM interactions JOIN users "
                "ON users.id = interactions.user"
            )
    assert sorted(users) == sorted(data.users.tolist())
    if how == "in-order":
        assert users == data.users.tolist()
    columns = (data.users[data.user], data.items[data.item], data.value, data.time)
    wanted = zip(*(column.tolist() for column in columns), strict=True)
    assert sorted(rows) == sorted(wanted)


def test_dealing_is_even_and_follows_the_seed():
    dealt = deal_users(100, 3, "random", 7)
    assert np.bincount(dealt).tolist() == [34, 33, 33]
    assert (dealt == deal_users(100, 3, "random", 7)).all()
    assert (dealt != deal_users(100, 3, "random", 8)).any()
    assert (np.diff(deal_users(100, 3, "in-order", 7)) >= 0).all()


def test_silos_stay_whole():
    holders = np.arange(60, dtype=np.int32) % 7
    dealt = deal_users(60, 3, "random", 0, holders)
    assert all(len(np.unique(dealt[holders == silo])) == 1 for silo in range(7))
    assert set(dealt) == {0, 1, 2}
    with pytest.raises(ConfigError, match="7 silos are too few for 8"):
        deal_users(60, 8, "random", 0, holders)


def test_a_rehearsal_of_silos(tmp_path):
    settings = ("--set", "silos.kind=dirichlet", "--set", "silos.count=9")
    done = init(tmp_path / "f", "--data", "demo", "--nodes", "2", "--method", "lipm", *settings)
    assert done.exit_code == 0, done.output
    silos = []
    for name in ("node-1", "node-2"):
        with NodeDatabase.open(tmp_path / "f" / "nodes" / name / "data.node") as store:
            silos.append({silo for (silo,) in store.rows("SELECT DISTINCT silo FROM users")})
            dealt = ServerFolder.open(tmp_path / "f" / "server").partition[name]
            assert dealt.clients.tolist() == sorted(silos[-1])
    assert not silos[0] & silos[1]
    assert silos[0] | silos[1] == set(range(9))


# ------------------------------------------------------------ the command


def test_nodes_that_bring_their_own_data(tmp_path):
    (tmp_path / "items.csv").write_text("item,title,genre\nx,Ex,a\ny,Why,b\nz,Zed,a\n")
    made = init(
        *(tmp_path / "shops", "--items", tmp_path / "items.csv", "--item-feature", "genre"),
        *("--node", "north", "--node", "south", "--host", "fed.example.org", "--port", "9000"),
        *("--method", "fedmf", "--json"),
    )
    assert made.exit_code == 0, made.output
    said = json.loads(made.output)
    assert said["nodes"] == {"north": None, "south": None}
    assert said["server"] == "fed.example.org:9000"
    assert said["items"] == 3
    server = ServerFolder.open(tmp_path / "shops" / "server")
    assert server.config.listen == "0.0.0.0"
    assert server.partition is None
    catalogue = server.contract.catalogue
    assert catalogue.digest == said["catalogue"]
    assert catalogue.titles.tolist() == ["Ex", "Why", "Zed"]
    assert list(catalogue.item_features) == ["genre"]
    north = NodeFolder.open(tmp_path / "shops" / "nodes" / "north")
    (tmp_path / "rows.csv").write_text("user,item,value,time\nu,x,1,1\nu,q,1,2\n")
    taken = CliRunner().invoke(
        main, ["node", "import", str(north.store), str(tmp_path / "rows.csv"), "--json"]
    )
    assert json.loads(taken.output) == {"rows": 2, "users": 1, "unknown_items": 1}


def test_a_damaged_partition_is_a_sentence(made, tmp_path):
    shutil.copytree(made / "server", tmp_path / "server")
    for text in ("", "[]", '{"ada": 3}', '{"ada": {"users": ["x"], "clients": []}}'):
        (tmp_path / "server" / "partition.json").write_text(text)
        with pytest.raises(ConfigError, match=r"partition\.json is damaged"):
            _ = ServerFolder.open(tmp_path / "server").partition


def test_a_server_that_only_this_machine_knows_awaits_nobody_else(tmp_path):
    done = init(tmp_path / "f", "--data", "demo", "--nodes", "12", "--json")
    assert done.exit_code == 0, done.output
    assert ServerFolder.open(tmp_path / "f" / "server").config.listen == "127.0.0.1"
    assert list(json.loads(done.output)["nodes"])[:2] == ["node-01", "node-02"]
    readme = (tmp_path / "f" / "README.txt").read_text()
    assert "hushrec federate node node-01" in readme
    assert str(tmp_path) not in readme


def test_one_id_per_line_is_a_list_of_items(tmp_path):
    (tmp_path / "items.txt").write_text("x\ny\n")
    done = init(
        tmp_path / "f", "--items", tmp_path / "items.txt", "--node", "a", "--method", "fedmf"
    )
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("--nodes", "2"), "--data for a rehearsal"),
        (("--data", "demo", "--items", "x.csv", "--nodes", "2"), "'demo' is a name"),
        (("--data", "{tmp}/rows.csv", "--nodes", "2", *CENTRAL), "taken from the users' rows"),
        (("--data", "demo", "--nodes", "2", *CENTRAL, "--set", "privacy.delta=0.1"), "delta"),
        (("--data", "demo"), "--nodes 3, or --node NAME"),
        (("--data", "demo", "--nodes", "2", "--node", "a"), "--nodes 3, or --node NAME"),
        (("--data", "demo", "--node", "A b"), "small letters"),
        (("--data", "demo", "--node", "../x"), "small letters"),
        (("--data", "demo", "--node", "a", "--node", "a"), "two nodes are called 'a'"),
        (("--data", "nothing", "--nodes", "2"), "nothing"),
        (("--data", "demo", "--nodes", "2", "--host", "a:80"), "without a port"),
        (("--data", "demo", "--nodes", "2", "--method", "central-mf"), "pools all data"),
        (("--data", "demo", "--nodes", "2", "--item-feature", "x"), "their own data"),
        (("--items", "{tmp}/twice.csv", "--node", "a"), "twice.csv, line 4.*there already"),
        (("--items", "{tmp}/none.csv", "--node", "a"), "none.csv"),
        (("--items", "{tmp}/bare.csv", "--node", "a"), "bare.csv"),
    ],
)
def test_what_cannot_be_made_is_a_sentence_and_leaves_nothing(tmp_path, words, match):
    (tmp_path / "twice.csv").write_text("item,title\nx,1\ny,2\nx,3\n")
    (tmp_path / "bare.csv").write_text("")
    rows = [f"u{user},i{item},1,{item}" for user in range(9) for item in range(9)]
    (tmp_path / "rows.csv").write_text("\n".join(["user,item,value,time", *rows]))
    before = sorted(tmp_path.iterdir())
    done = init(tmp_path / "f", *(word.format(tmp=tmp_path) for word in words))
    assert done.exit_code == 2
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert re.search(match, done.output), done.output
    assert sorted(tmp_path.iterdir()) == before


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "mine.txt").write_text("mine")
    done = init(tmp_path / "f", "--data", "demo", "--nodes", "2")
    assert done.exit_code == 2
    assert "exists already" in done.output
    assert list((tmp_path / "f").iterdir()) == [tmp_path / "f" / "mine.txt"]
    (tmp_path / "g").write_text("a file")
    assert init(tmp_path / "g", "--data", "demo", "--nodes", "2").exit_code == 2
    assert (tmp_path / "g").read_text() == "a file"


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hushrec.deployment.provisioning.write_identities", full)
    done = init(tmp_path / "f", "--data", "demo", "--nodes", "2")
    assert done.exit_code == 2
    assert "the disk is full" in done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("file", "text", "match"),
    [
        ("config.toml", "federation = 'x", "config.toml: not valid TOML"),
        ("config.toml", "federation = 'tastes'\nname = 'ada'\nserve = 'x'", "server"),
        ("config.toml", "federation = 'tastes'\nname = 'ada'\nserver = 3", "'server'"),
        ("identities.toml", "federation = 'other'\n[nodes]\n", "is of the federation 'other'"),
        ("identities.toml", "federation = 'tastes'\n[nodes]\nada = 'ff'", "nodes.ada is not 32"),
        ("identities.toml", "federation = 'tastes'\n[nodes]\n", "does not know 'ada'"),
        ("ca.crt", "x", "not a certificate"),
    ],
)
def test_a_damaged_folder_is_a_sentence(made, tmp_path, file, text, match):
    shutil.copytree(made / "nodes" / "ada", tmp_path / "ada")
    (tmp_path / "ada" / file).write_text(text)
    with pytest.raises(ConfigError, match=match):
        NodeFolder.open(tmp_path / "ada")
