"""The folders of `deploy/kubernetes`, rendered by kustomize and held against Kubernetes' schemas, kvtier and vLLM."""

import copy
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvtier.config.loader import load

TOP = Path(__file__).parents[3]
FOLDER = TOP / "deploy/kubernetes"
OVERLAYS = ["base", "local-drive", "s3", "valkey", "prefill-decode"]
CHARTS = ["llm-d", "production-stack", "kserve"]
"""Folders with a component for others' manifests, values for a chart, and a resource for an operator."""
GUIDE = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: decode}
spec:
  selector: {matchLabels: {llm-d.ai/role: decode}}
  template:
    metadata: {labels: {llm-d.ai/role: decode}}
    spec:
      containers: [{name: modelserver, image: vllm, args: [old], volumeMounts: [{name: shm, mountPath: /dev/shm}]}]
      volumes: [{name: shm, emptyDir: {medium: Memory}}]
"""
"""A model server as llm-d's guides make it, for the component."""
EVENTS = "kv-events"
"""A component, tested on top of an overlay with two sets of servers."""
RELEASES = ["1.33", "1.37"]
"""Of Kubernetes: the oldest that has all of it, and the newest whose schemas are there."""
VLLM = TOP / ".venv-vllm/bin/python"
DEADLINE_S = 120.0
SECRETS = {
    "kvtier": {"secret"},
    "kvtier-s3": {"access-key-id", "secret-access-key"},
    "kvtier-valkey": {"password", "users.acl"},
}
"""Names and keys of Secrets that the guide says to make."""
ROLES = {"vllm-prefill": "prefill"}


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    where = os.environ | environment
    return subprocess.run(command, env=where, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def kustomize(folder: Path) -> list[dict[str, Any]]:
    """The objects that a folder makes."""
    yaml = pytest.importorskip("yaml")
    command = ["kustomize", "build"] if shutil.which("kustomize") else ["kubectl", "kustomize"]
    if shutil.which(command[0]) is None:
        pytest.skip("needs kubectl or kustomize")
    done = run([*command, str(folder)])
    assert done.returncode == 0, done.stderr
    return [it for it in yaml.safe_load_all(done.stdout) if it]


@functools.cache
def rendered(name: str) -> list[dict[str, Any]]:
    return kustomize(FOLDER / name)


def of_kind(objects: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [it for it in objects if it["kind"] in kinds]


def engines(objects: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name, pod and container of each set of vLLM servers."""
    sets = [it for it in of_kind(objects, "StatefulSet") if it["metadata"]["name"].startswith("vllm")]
    pods = [(it["metadata"]["name"], it["spec"]["template"]["spec"]) for it in sets]
    return [(name, pod, pod["containers"][0]) for name, pod in pods]


def settings_file(objects: list[dict[str, Any]], pod: dict[str, Any], folder: Path) -> Path:
    """The settings that the pod mounts."""
    (mounted,) = [it["configMap"]["name"] for it in pod["volumes"] if it["name"] == "settings"]
    (text,) = [it["data"]["kvtier.toml"] for it in of_kind(objects, "ConfigMap") if it["metadata"]["name"] == mounted]
    file = folder / "kvtier.toml"
    file.write_text(text)
    return file


def environment(container: dict[str, Any]) -> dict[str, str]:
    """Variables of kvtier, with a stand-in for each secret; the settings file aside."""
    given = {it["name"]: it.get("value", "0" * 64) for it in container["env"]}
    return {name: value for name, value in given.items() if name.startswith("KVTIER_") and name != "KVTIER_CONFIG"}


def kvtier(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-m", "kvtier.cli.main", *arguments], **variables)


def checked(file: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """`kvtier config check` of the settings, with places and sizes of this machine instead of the node's."""
    settings = ["host.capacity_bytes=64MiB"]
    for tier in tomllib.loads(file.read_text()).get("tiers", []):
        if tier["kind"] == "disk":
            settings += [f"tiers.disk.path={file.parent}/kv", "tiers.disk.capacity_bytes=1GiB"]
        if "password_file" in tier:
            password = file.parent / "password"
            password.write_text("x")
            settings.append(f"tiers.{tier['kind']}.password_file={password}")
    given = [part for setting in settings for part in ("--set", setting)]
    return kvtier("config", "check", "--file", str(file), *given, **variables)


def validate(thing: dict[str, Any], release: str) -> None:
    pytest.importorskip("kubernetes_validate").validate(thing, release, strict=True)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", OVERLAYS)
def test_every_object_is_one_of_kubernetes(name, release):
    for thing in rendered(name):
        validate(thing, release)


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (["spec"], {"terminationGracePeriodSecond": 90}),
        (["spec", "containers", 0], {"volumeMount": []}),
        (["spec", "containers", 0, "securityContext", "capabilities"], {"ad": ["IPC_LOCK"]}),
        (["spec", "containers", 0, "readinessProbe"], {"periodSeconds": "5"}),
        (["spec", "volumes", 0], {"emptydir": {}}),
    ],
    ids=lambda it: next(iter(it)) if isinstance(it, dict) else None,
)
def test_a_misspelt_field_is_noticed(path, wrong):
    (things,) = [of_kind(copy.deepcopy(rendered("base")), "StatefulSet")]
    place: Any = things[0]["spec"]["template"]
    for step in path:
        place = place[step]
    place.update(wrong)
    with pytest.raises(Exception, match=next(iter(wrong)) if "periodSeconds" not in wrong else "integer"):
        validate(things[0], RELEASES[-1])


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_settings_are_those_of_kvtier(name, tmp_path):
    for _, pod, container in engines(rendered(name)):
        file = settings_file(rendered(name), pod, tmp_path)
        done = checked(file, environment(container))
        assert (done.returncode, done.stdout) == (0, "the settings can work here\n"), done.stdout + done.stderr
        mounts = [it["mountPath"] for it in container["volumeMounts"]]
        for tier in tomllib.loads(file.read_text()).get("tiers", []):
            for place in (tier[key] for key in ("path", "password_file") if key in tier):
                assert any(place.startswith(f"{mount}/") for mount in mounts)


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("capacity_bytes =", "capacity_byte =", "capacity_byte"),
        ('"https://s3', '"http://s3', "allow_http"),
        ("[control]", "[controll]", "controll"),
    ],
)
def test_a_misspelt_setting_is_noticed(right, wrong, said, tmp_path):
    _, pod, container = engines(rendered("s3"))[0]
    file = settings_file(rendered("s3"), pod, tmp_path)
    file.write_text(file.read_text().replace(right, wrong, 1))
    done = checked(file, environment(container))
    assert done.returncode == 2
    assert said in done.stderr


def test_servers_that_share_have_the_secret(tmp_path):
    _, pod, container = engines(rendered("s3"))[0]
    file = settings_file(rendered("s3"), pod, tmp_path)
    without = {name: value for name, value in environment(container).items() if name != "KVTIER_STORE__SECRET"}
    assert without != environment(container)
    assert "secret" in checked(file, without).stderr


def transfer_config(container: dict[str, Any]) -> dict[str, Any]:
    (text,) = [it for it in container["args"] if it.startswith("--kv-transfer-config=")]
    return json.loads(text.partition("=")[2])


@pytest.mark.parametrize("name", OVERLAYS)
def test_vllm_gets_what_kvtier_prints(name, tmp_path):
    for server, pod, container in engines(rendered(name)):
        file = settings_file(rendered(name), pod, tmp_path)
        variables = environment(container) | {"KVTIER_CONFIG": str(file), "KVTIER_HOST__CAPACITY_BYTES": "64MiB"}
        done = kvtier("vllm", "config", "--role", ROLES.get(server, "both"), **variables)
        expected = json.loads(done.stdout)
        assert expected.pop("kv_connector_extra_config") == {}  # the file and the environment have the settings
        assert transfer_config(container) == expected


def seconds(container: dict[str, Any]) -> int:
    (text,) = [it for it in container["args"] if it.startswith("--shutdown-timeout=")]
    return int(text.partition("=")[2])


def check_limits(config: Any, pod: dict[str, Any], *, open_s: int, end_s: int) -> None:
    """A pod has time for open requests, kvtier's writes and vLLM's end, and memory for kvtier, /dev/shm and vLLM."""
    container = pod["containers"][0]
    assert seconds(container) >= config.limits.close_deadline_s + open_s
    stop_s = int(re.sub(r"\D", "", str(container["lifecycle"]["preStop"])))
    assert pod["terminationGracePeriodSeconds"] >= stop_s + seconds(container) + end_s
    (shm,) = [it["emptyDir"] for it in pod["volumes"] if it.get("emptyDir", {}).get("medium") == "Memory"]
    shm_bytes, limit = (
        int(it.removesuffix("Gi")) << 30 for it in (shm["sizeLimit"], container["resources"]["limits"]["memory"])
    )
    assert limit - config.host.capacity_bytes - shm_bytes >= 16 << 30
    assert config.control.socket is not None


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_pod_has_time_to_write_and_room_for_its_memory(name, tmp_path):
    for _, pod, container in engines(rendered(name)):
        config = load(settings_file(rendered(name), pod, tmp_path), environ=environment(container)).config
        check_limits(config, pod, open_s=30, end_s=20)


def charted(name: str, folder: Path) -> dict[str, Any]:
    """The pod that another project makes with a folder's files. What it adds for the end of a pod is written here."""
    if name == "llm-d":
        (folder / "guide.yaml").write_text(GUIDE)
        here = os.path.relpath(FOLDER / name, folder.resolve())
        (folder / "kustomization.yaml").write_text(f"resources: [guide.yaml]\ncomponents: [{here}]\n")
        return kustomize(folder)[0]["spec"]["template"]["spec"]
    (file,) = (FOLDER / name).glob("*.yaml")
    given = pytest.importorskip("yaml").safe_load(file.read_text())
    if name == "production-stack":  # it sets neither preStop nor the grace period, which is 30 s then
        (model,) = given["servingEngineSpec"]["modelSpec"]
        container = {it: model[it] for it in ("name", "env", "resources")} | {
            "args": model["vllmConfig"]["extraArgs"],
            "volumeMounts": model["extraVolumeMounts"],
            "lifecycle": {"preStop": {"sleep": {"seconds": 0}}},
        }
        shm = {"medium": "Memory", "sizeLimit": model["shmSize"]}
        return {
            "initContainers": [
                json.loads(json.dumps(model["initContainer"]).replace("extraVolumeMounts", "volumeMounts"))
            ],
            "containers": [container],
            "volumes": [*model["extraVolumes"], {"name": "shm", "emptyDir": shm}],
            "terminationGracePeriodSeconds": 30,
        }
    # KServe has a preStop of 15 s and leaves vLLM the rest but 5 s. A shell reads the arguments.
    pod = given["spec"]["template"]
    container = pod["containers"][0]
    more = {it["name"]: it.get("value") for it in container["env"]}["VLLM_ADDITIONAL_ARGS"]
    container["args"] = [f"--shutdown-timeout={pod['terminationGracePeriodSeconds'] - 20}", "=".join(shlex.split(more))]
    container["lifecycle"] = {"preStop": {"sleep": {"seconds": 15}}}
    return pod


@pytest.mark.parametrize("name", CHARTS)
def test_what_others_charts_make_is_a_pod_of_kubernetes(name, tmp_path):
    pod = charted(name, tmp_path)
    thing = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": pod}
    for release in RELEASES:
        validate(thing, release)
    mounts = pod["containers"][0]["volumeMounts"] + pod["initContainers"][0]["volumeMounts"]
    assert {it["name"] for it in mounts} <= {it["name"] for it in pod["volumes"]}
    for secret, key in re.findall(r"'secretKeyRef': {'name': '(.*?)', 'key': '(.*?)'}", str(pod)):
        assert key in SECRETS[secret]
    pod["volumes"][0]["emptydir"] = {}
    with pytest.raises(Exception, match="emptydir"):
        validate(thing, RELEASES[-1])


@pytest.mark.parametrize("name", CHARTS)
def test_what_others_charts_set_are_settings_of_kvtier(name, tmp_path):
    pod, empty = charted(name, tmp_path), tmp_path / "kvtier.toml"
    empty.touch()
    given = environment(pod["containers"][0])
    here = given["KVTIER_TIERS"].replace("/mnt/drive/", f"{tmp_path}/").replace("900GiB", "1GiB")
    done = checked(empty, given | {"KVTIER_TIERS": here})
    assert (done.returncode, done.stdout) == (0, "the settings can work here\n"), done.stdout + done.stderr
    assert "capacty" in checked(empty, given | {"KVTIER_TIERS": here.replace("capacity", "capacty")}).stderr
    assert transfer_config(pod["containers"][0]) == transfer_config(engines(rendered("base"))[0][2])
    check_limits(load(None, environ=given).config, pod, open_s=10, end_s=5)


@pytest.mark.parametrize("name", OVERLAYS)
def test_all_that_is_named_is_there(name):
    objects = rendered(name)
    services = {it["metadata"]["name"]: it["spec"] for it in of_kind(objects, "Service")}
    for thing in of_kind(objects, "StatefulSet", "Deployment"):
        template = thing["spec"]["template"]
        pod, labels = template["spec"], template["metadata"]["labels"].items()
        assert thing["spec"]["selector"]["matchLabels"].items() <= labels
        assert any(service["selector"].items() <= labels for service in services.values())
        assert thing["spec"].get("serviceName", "proxy") in services
        claimed = {it["metadata"]["name"] for it in thing["spec"].get("volumeClaimTemplates", [])}
        volumes = claimed | {it["name"] for it in pod["volumes"]}
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            assert {it["name"] for it in container["volumeMounts"]} <= volumes
            for variable in container.get("env", []):
                if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
                    assert reference["key"] in SECRETS[reference["name"]]
        for secret in (it["secret"] for it in pod["volumes"] if "secret" in it):
            assert {it["key"] for it in secret["items"]} <= SECRETS[secret["secretName"]]
    for host in re.findall(r'http://([\w-]+):8000"|"([\w-]+):6379', json.dumps(objects).replace("\\", "")):
        assert "".join(host) in services


def test_the_guide_makes_the_secrets():
    text = (FOLDER / "README.md").read_text()
    made = dict(re.findall(r"kubectl create secret generic (\S+)((?: \\\n|.)*)", text))
    assert {
        name: set(re.findall(r"--from-(?:literal|file)=([\w.-]+)=", rest)) for name, rest in made.items()
    } == SECRETS
    assert len(text.split()) <= 800


def vllm_serve(all_arguments: list[list[str]]) -> subprocess.CompletedProcess[str]:
    """What vLLM's own parser makes of command lines of `vllm serve`, without starting anything."""
    script = (
        "import json, sys\n"
        "from vllm.entrypoints.launchers.cli_args import make_arg_parser\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "parser = make_arg_parser(FlexibleArgumentParser(prog='vllm serve'))\n"
        "for line in json.loads(sys.argv[1]):\n"
        "    made = parser.parse_args(line)\n"
        "    print(made.shutdown_timeout, made.kv_transfer_config.kv_role, made.kv_events_config)\n"
    )
    if not VLLM.exists():
        pytest.skip("needs vLLM: make test-vllm makes .venv-vllm")
    return run([str(VLLM), "-c", script, json.dumps(all_arguments)], VLLM_LOGGING_LEVEL="ERROR")


def command_line(container: dict[str, Any]) -> list[str]:
    assert container["command"][:2] == ["vllm", "serve"]
    return [*container["command"][2:], *container["args"]]


def with_events(folder: Path) -> list[dict[str, Any]]:
    """The servers for prefill and decode, with the component for routers."""
    here = os.path.relpath(FOLDER, folder.resolve())
    (folder / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
        f"resources: [{here}/prefill-decode]\ncomponents: [{here}/{EVENTS}]\n"
    )
    return kustomize(folder)


def test_vllm_takes_the_arguments(tmp_path):
    announcing = with_events(tmp_path)
    for thing in announcing:
        validate(thing, RELEASES[-1])
    lines = [command_line(it) for name in OVERLAYS for _, _, it in engines(rendered(name))]
    lines += [command_line(it) for _, _, it in engines(announcing)]
    lines += [["--model=model", *charted(name, tmp_path)["containers"][0]["args"]] for name in CHARTS]
    wrong = [it.replace("--shutdown-timeout", "--shutdown-timeot") for it in lines[0]]
    done = vllm_serve([*lines, wrong])
    made = [it for it in done.stdout.splitlines() if re.match(r"\d+ kv_", it)]
    assert [it.split()[0] for it in made] == [*["60"] * (len(lines) - 2), "20", "70"], done.stderr[-2000:]
    assert ["tcp://*:5557" in it for it in made] == [False] * (len(lines) - 5) + [True] * 3 + [False] * 2
    assert done.returncode == 2
    assert "unrecognized arguments: --shutdown-timeot" in done.stderr
