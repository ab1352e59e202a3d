"""The Helm chart: rendered by Helm's own engine, every object valid, and the parts agree with each other."""

import importlib.util
import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from fathom.server.command import command_line

helm = pytest.importorskip("helm_python", reason="needs helm-python-sdk: run `make test`")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="run `make test`")

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "chart"
CUSTOM = json.loads((Path(__file__).parent / "custom_resources.json").read_text())
KUBERNETES = ("1.30", "1.37")  # the oldest that Chart.yaml allows, and the newest known here

MONITORED = {"serviceMonitor": {"enabled": True}, "rules": {"enabled": True}, "dashboard": {"enabled": True}}
CASES = {
    "defaults": {},
    "demo on a CPU": {
        "gpu": {"count": 0},
        "cache": {"enabled": False},
        "image": {"repository": "f", "tag": "cpu"},
    },
    "one node": {
        "model": {"path": "org/m", "name": "m", "revision": "v1", "draft": "org/d", "tokenSecret": "hf"},
        "gpu": {"count": 4, "runtimeClassName": "nvidia"},
        "parallel": {"tensorSize": 4},
        "replicas": 3,
        "server": {"contextLength": 131072, "maxRunningRequests": 32, "extraArgs": ["--enable-cache-report"]},
        "auth": {"existingSecret": "keys"},
        "cache": {"accessModes": ["ReadWriteMany"]},
        "autoscaling": {"enabled": True},
        "monitoring": MONITORED,
        "router": {"enabled": True},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "nodeSelector": {"gpu": "h100"},
        "imagePullSecrets": [{"name": "registry"}],
        "podAnnotations": {"a": "b"},
    },
    "several nodes": {
        "model": {"path": "org/large"},
        "gpu": {"count": 8},
        "parallel": {"tensorSize": 16},
        "replicas": 2,
        "autoscaling": {"enabled": True, "metric": "fathom_ttft_p95_seconds", "target": "10"},
        "monitoring": MONITORED,
        "cache": {"existingClaim": "models"},
    },
}


def render(values: dict) -> dict[str, dict]:
    """The objects of a release, by ``Kind/name``."""
    with helm.Chart.load(CHART) as chart:
        texts = chart.render(values, name="demo", namespace="llm")
    objects = [item for text in texts.values() for item in yaml.safe_load_all(text) if item]
    found = {f"{item['kind']}/{item['metadata']['name']}": item for item in objects}
    assert len(found) == len(objects)
    return found


@pytest.fixture(params=CASES, scope="module")
def release(request):
    return render(CASES[request.param])


def pods(release) -> list[tuple[dict, dict]]:
    """(labels, pod spec) of every pod template."""
    templates = []
    for item in release.values():
        if item["kind"] == "Deployment":
            templates.append(item["spec"]["template"])
        elif item["kind"] == "LeaderWorkerSet":
            group = item["spec"]["leaderWorkerTemplate"]
            templates += [group["leaderTemplate"], group["workerTemplate"]]
    return [(template["metadata"]["labels"], template["spec"]) for template in templates]


def component(release, name: str) -> list[tuple[dict, dict]]:
    return [pod for pod in pods(release) if pod[0]["app.kubernetes.io/component"] == name]


def test_helm_finds_nothing_to_complain_about():
    for values in CASES.values():
        report = helm.lint(CHART, values, strict=True)
        problems = [m for m in report["messages"] if m["severity"] > 1]
        assert not problems and not report["errors"]


def check_object(item: dict, version: str) -> None:
    key = f"{item['apiVersion']}/{item['kind']}"
    if key not in CUSTOM:
        kubernetes_validate.validate(item, version, strict=True)
        return
    jsonschema.validate(item["spec"], {**CUSTOM[key], "$defs": CUSTOM["$defs"]})
    if item["kind"] == "LeaderWorkerSet":
        for name, template in item["spec"]["leaderWorkerTemplate"].items():
            if name.endswith("Template"):
                pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": template["spec"]}
                kubernetes_validate.validate(pod, version, strict=True)


@pytest.mark.parametrize("version", KUBERNETES)
def test_every_object_fits_its_schema(release, version):
    for item in release.values():
        check_object(item, version)


def test_the_schema_check_can_fail():
    broken = render({})["Deployment/demo"]
    broken["spec"]["template"]["spec"]["containers"][0]["livenessprobe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        check_object(broken, KUBERNETES[0])


def test_selectors_find_the_serving_pods_only(release):
    for labels, _ in component(release, "worker") + component(release, "router"):
        assert not matches(release["Service/demo"]["spec"]["selector"], labels)
    ((labels, _),) = component(release, "server")
    assert matches(release["Service/demo"]["spec"]["selector"], labels)


def test_disruptions_are_limited_for_every_pod_that_holds_a_part_of_the_model(release):
    selector = release["PodDisruptionBudget/demo"]["spec"]["selector"]
    (asked,) = selector["matchExpressions"]
    assert asked["operator"] == "In"
    for labels, _ in pods(release):
        found = matches(selector["matchLabels"], labels) and labels[asked["key"]] in asked["values"]
        assert found == (labels["app.kubernetes.io/component"] != "router")


def matches(selector: dict, labels: dict) -> bool:
    return selector.items() <= labels.items()


def test_fathom_accepts_the_arguments(release, tmp_path):
    (tmp_path / "keys.yaml").write_text("api-key: secret\nadmin-api-key: other\n")
    for _, spec in component(release, "server") + component(release, "worker"):
        args = [str(arg).replace("/etc/fathom", str(tmp_path)) for arg in spec["containers"][0]["args"]]
        assert args[0] == "serve"
        work = command_line.plan(args[1:])
        assert (work.host, work.port) == ("0.0.0.0", 30000)
        assert work.gate.max_in_flight == 256 and work.gate.drain_seconds == 120


def test_pods_that_have_ipv6_addresses_only_can_be_probed():
    """0.0.0.0 is none of theirs."""
    ((_, spec),) = pods(render({"server": {"host": "::"}}))
    assert command_line.plan(spec["containers"][0]["args"][1:]).host == "::"


def test_sglang_has_the_options_and_the_routes(release):
    """By name, in the installed SGLang's text: importing it would take longer than all other tests here."""
    package = Path(importlib.util.find_spec("sglang").submodule_search_locations[0]) / "srt"
    fields = " ".join(path.read_text() for path in (package / "arg_groups" / "fields").rglob("*.py"))
    own = {word for action in command_line.parser()._actions for word in action.option_strings}
    routes = (package / "entrypoints" / "http_server.py").read_text()
    for _, spec in component(release, "server") + component(release, "worker"):
        container = spec["containers"][0]
        for flag in (str(arg).split("=")[0] for arg in container["args"] if str(arg).startswith("--")):
            assert flag in own or f"{flag[2:].replace('-', '_')}:" in fields, flag
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if probe in container:
                assert f'@app.get("{container[probe]["httpGet"]["path"]}")' in routes


def test_a_pod_has_time_to_drain(release):
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    drain = values["server"]["drainSeconds"]
    for _, spec in component(release, "server"):
        stop = spec["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert spec["terminationGracePeriodSeconds"] >= stop + drain + 20
    for _, worker in component(release, "worker"):  # computes for its leader until that has drained
        lasts = worker["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert stop + drain <= lasts <= worker["terminationGracePeriodSeconds"] - 20


def test_a_rollout_may_take_as_long_as_a_pods_start():
    spec = render({"probes": {"startupMinutes": 45}})["Deployment/demo"]["spec"]
    probe = spec["template"]["spec"]["containers"][0]["startupProbe"]
    assert spec["progressDeadlineSeconds"] > probe["periodSeconds"] * probe["failureThreshold"] == 45 * 60


def test_pods_run_without_privileges(release):
    for _, spec in pods(release):
        container = spec["containers"][0]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 10001
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
        assert mounted == {volume["name"] for volume in spec.get("volumes", [])}


def test_gpus_and_ranks_of_several_nodes():
    group = render(CASES["several nodes"])["LeaderWorkerSet/demo"]["spec"]["leaderWorkerTemplate"]
    assert group["size"] == 2
    for name in ("leaderTemplate", "workerTemplate"):
        container = group[name]["spec"]["containers"][0]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
        assert {"--tp-size=16", "--nnodes=2", "--node-rank=$(LWS_WORKER_INDEX)"} <= set(container["args"])
        assert ("ports" in container) == ("readinessProbe" in container) == (name == "leaderTemplate")


@pytest.mark.parametrize("case", ["one node", "several nodes"])
def test_autoscaling_asks_for_what_the_adapter_serves(case):
    release = render(CASES[case])
    scaler = release["HorizontalPodAutoscaler/demo"]["spec"]
    target = scaler["scaleTargetRef"]
    scaled = release[f"{target['kind']}/{target['name']}"]
    assert scaled["apiVersion"] == target["apiVersion"] and "replicas" not in scaled["spec"]
    adapter = yaml.safe_load((CHART / "files" / "adapter.yaml").read_text())["rules"]["custom"]
    assert scaler["metrics"][0]["pods"]["metric"]["name"] in {rule["name"]["as"] for rule in adapter}


def test_the_monitor_finds_the_port():
    release = render(CASES["one node"])
    monitor = release["ServiceMonitor/demo"]["spec"]
    service = release["Service/demo"]
    assert matches(monitor["selector"]["matchLabels"], service["metadata"]["labels"])
    assert not matches(
        monitor["selector"]["matchLabels"], release["Service/demo-router"]["metadata"]["labels"]
    )
    assert monitor["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}
    # The job's label, which the rules and the dashboard look for.
    assert "fathom" in service["metadata"]["labels"][monitor["jobLabel"]]
    rules = yaml.safe_load((CHART / "files" / "rules.yaml").read_text())
    assert release["PrometheusRule/demo"]["spec"] == rules
    board = json.loads(release["ConfigMap/demo-dashboard"]["data"]["fathom.json"])
    assert board == json.loads((CHART / "files" / "dashboard.json").read_text())


def test_the_router_finds_the_servers():
    release = render(CASES["one node"])
    container = release["Deployment/demo-router"]["spec"]["template"]["spec"]["containers"][0]
    args = container["args"]
    at = args.index("--selector") + 1
    labels_end = next((i for i in range(at, len(args)) if args[i].startswith("--")), len(args))
    selector = dict(word.split("=") for word in args[at:labels_end])
    ((labels, spec),) = component(release, "server")
    assert matches(selector, labels)
    assert f"--service-discovery-port={spec['containers'][0]['ports'][0]['containerPort']}" in args
    role = release["Role/demo-router"]["rules"]
    assert role == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    key = {"secretKeyRef": {"name": "keys", "key": "api-key"}}
    assert container["env"] == [{"name": "FATHOM_API_KEY", "valueFrom": key}]
    assert "--api-key=$(FATHOM_API_KEY)" in args


def test_a_router_without_keys():
    values = {"router": {"enabled": True}}
    container = render(values)["Deployment/demo-router"]["spec"]["template"]["spec"]["containers"][0]
    assert "env" not in container
    assert not any(word.startswith("--api-key") for word in container["args"])


@pytest.mark.parametrize(
    "values",
    [
        {"policy": {"preset": "fast"}},
        {"replica": 3},
        {"server": {"maxInFlight": 0}},
        {"parallel": {"tensorSize": 12}, "gpu": {"count": 8}},
        {"monitoring": {"rules": {"enable": True}}},
        {"monitoring": {"serviceMonitor": {"interva": "5s"}}},
        {"model": {"path": "org/m", "draft": "org/d"}, "server": {"extraArgs": ["--no-gpu-depth-pages"]}},
        {"policy": {"preset": "turbo", "args": ["--no-gpu-depth-pages"]}},
        {"replicas": 2},
        {"autoscaling": {"enabled": True}},
        {"parallel": {"tensorSize": 16}, "gpu": {"count": 8}},
        {"auth": {"existingSecret": "keys"}, "server": {"extraArgs": ["--config=more.yaml"]}},
        {"strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}},
        {"strategy": {"rollingUpdate": {"maxSurge": "25%"}}},
        {"strategy": {"type": "OnDelete"}},
        {"strategy": {"maxSurge": 1}},
        {"gpu": {"count": 8}, "parallel": {"tensorSize": 4}},
        {"gpu": {"count": 2}},
        {"server": {"extraArgs": ["--port=8080"]}},
        {"server": {"extraArgs": ["--host", "::"]}},
        {"policy": {"args": ["--port", "30001"]}},
        {"server": {"host": "127.0.0.1"}},
        {"server": {"host": "::"}, "router": {"enabled": True}},
    ],
    ids=[
        "preset",
        "unknown value",
        "no requests",
        "uneven nodes",
        "unknown value of the rules",
        "unknown value of the monitor",
        "draft without depth pages",
        "preset without depth pages",
        "cache of one node for two replicas",
        "cache of one node for more replicas",
        "cache of one node for several nodes",
        "two files of options",
        "cache of one node for an update's pod",
        "cache of one node for a share of pods",
        "strategy of other objects",
        "strategy without its type",
        "GPUs that nobody uses",
        "a second GPU that nobody uses",
        "a port that the Service does not know",
        "an address of one's own",
        "a port among the policy's flags",
        "an address that no probe reaches",
        "a router that could not be reached",
    ],
)
def test_mistaken_values_are_refused(values):
    with pytest.raises(helm.HelmError), helm.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        chart.render(values, name="demo", namespace="llm")


@pytest.mark.parametrize(
    "values",
    [
        {"gpu": {"count": 0}, "model": {"path": "org/m", "draft": "org/d"}, "policy": {"preset": "turbo"}},
        {"model": {"path": "org/m", "draft": "org/d"}, "policy": {"preset": "turbo"}},
        {"server": {"extraArgs": ["--no-gpu-depth-pages"]}},
        {"gpu": {"count": 2}, "server": {"extraArgs": ["--no-gpu-depth-pages", "--pp-size=2"]}},
        {"replicas": 2, "cache": {"existingClaim": "models"}},
        {"replicas": 2, "cache": {"enabled": False}},
        {"strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}, "cache": {"enabled": False}},
    ],
    ids=[
        "draft on a CPU",
        "draft on a GPU",
        "dense without depth pages",
        "GPUs for layers",
        "claim of one's own",
        "no cache",
        "a pod more at updates",
    ],
)
def test_values_are_taken_where_they_have_what_they_need(values):
    assert "Deployment/demo" in render(values)


def test_pods_that_end_before_others_begin_have_no_rolling_update():
    """Kubernetes refuses its numbers beside the other type."""
    found = render({"strategy": {"type": "Recreate"}})["Deployment/demo"]["spec"]["strategy"]
    assert found == {"type": "Recreate"}
    found = render({})["Deployment/demo"]["spec"]["strategy"]
    assert found == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}


def test_what_no_machine_has_is_told_in_words():
    with pytest.raises(helm.HelmError, match=r"tensorSize 2 counts GPUs, and gpu\.count is 0"):
        render({"gpu": {"count": 0}, "parallel": {"tensorSize": 2}})


def test_options_that_the_pod_would_not_go_with_are_told_in_words():
    with pytest.raises(helm.HelmError, match=r"gpu\.count 8 is more than parallel\.tensorSize 4"):
        render({"gpu": {"count": 8}, "parallel": {"tensorSize": 4}})
    with pytest.raises(helm.HelmError, match="--port=8080: the probes and the Service want"):
        render({"server": {"extraArgs": ["--port=8080"]}})


def test_a_range_of_replicas_that_is_none_is_told_in_words():
    values = {"enabled": True, "minReplicas": 3, "maxReplicas": 2}
    with pytest.raises(helm.HelmError, match=r"minReplicas 3 is more than autoscaling\.maxReplicas 2"):
        render({"autoscaling": values, "cache": {"enabled": False}})
    assert "HorizontalPodAutoscaler/demo" in render(
        {"autoscaling": values | {"maxReplicas": 3}, "cache": {"enabled": False}}
    )


def test_a_name_is_one_word_whatever_is_in_it():
    names = {"name": "my model: v1 #2", "revision": "a: b", "draft": "d: #"}
    values = {"model": {"path": "org/m", **names}}
    args = render(values)["Deployment/demo"]["spec"]["template"]["spec"]["containers"][0]["args"]
    flags = ("--served-model-name", "--revision", "--draft-model-path")
    assert {f"{flag}={value}" for flag, value in zip(flags, names.values(), strict=True)} <= set(args)
