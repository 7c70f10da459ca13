"""What the values that matter do, and which are refused."""

import tomllib
from typing import Any

import pytest
import yaml

from prfaas.version import VERSION
from tests.deploy.chart import (
    CHART,
    EVERYTHING,
    Document,
    Refused,
    container,
    environment,
    helm,
    of_kind,
    pods,
    region_file,
    rendered,
    services_of_ours,
    template,
    toml_of,
)


def workloads(documents: list[Document]) -> set[str]:
    return {name for name, pod in pods(documents) if pod["metadata"]["labels"]["role"] != "smoke-test"}


def test_each_region_runs_its_part() -> None:
    assert workloads(rendered("a")) == {"prfaas-prefill-worker-h200", "prfaas-cache-pool"}
    assert workloads(rendered("b")) == {"prfaas-router", "prfaas-decode-worker-h20", "prfaas-cache-pool", "prfaas-etcd"}


def test_the_store_is_the_releases_own_or_the_one_named() -> None:
    """Region b has the members' names, region a the address of the balancer before them."""
    own = tomllib.loads(toml_of(rendered("b"), "prfaas-router"))["store"]["endpoints"]
    assert own == [f"prfaas-etcd-{i}.prfaas-etcd.serving.svc:2379" for i in range(3)]
    named = tomllib.loads(toml_of(rendered("a"), "prfaas-prefill-worker-h200"))["store"]["endpoints"]
    assert named == ["etcd.region-b.example.com:2379"]


def test_etcd_members_know_each_other_and_ask_for_certificates() -> None:
    etcd = container(dict(pods(rendered("b")))["prfaas-etcd"])["args"]
    [members] = [argument for argument in etcd if argument.startswith("--initial-cluster=")]
    assert members.count("https://prfaas-etcd-") == 3
    assert {"--client-cert-auth=true", "--peer-client-cert-auth=true"} <= set(etcd)
    assert "--peer-cert-allowed-hostname=store.prfaas.internal" in etcd
    assert "--experimental-peer-skip-client-san-verification=true" in etcd
    made = of_kind(rendered("b"), "Certificate")["prfaas-store"]["spec"]["dnsNames"]
    assert {"store.prfaas.internal", "*.prfaas-etcd.serving.svc", "etcd.region-b.example.com"} <= set(made)


@pytest.mark.parametrize(
    ("across", "outside"),
    [
        ({"mode": "loadBalancer", "domain": "a.example"}, "prfaas-prefill-worker-h200-2.a.example"),
        ({"mode": "hostNetwork", "domain": "a.example"}, "node-7.a.example"),
        ({"mode": "hostNetwork", "domain": ""}, "10.1.2.3"),
        ({"mode": "podIP", "domain": ""}, "10.1.2.3"),
    ],
)
def test_prefill_workers_tell_others_where_they_are(across: dict[str, str], outside: str) -> None:
    """KV has the pod's own address within the region and the other one for others; routers are in another region."""
    name = "prfaas-prefill-worker-h200"
    documents = rendered("a", {"defaults": {"acrossRegions": across}})
    found = environment(dict(pods(documents))[name], f"{name}-2", "10.1.2.3")
    assert found["PRFAAS_WORKER_RPC_ADVERTISE"] == f"{outside}:7000"
    assert found["PRFAAS_WORKER_LINK_ADVERTISE"] == f"{outside}:7001"
    kv = dict(pair.rsplit("=", 1) for pair in found["PRFAAS_KV_ADVERTISE"].split(","))
    assert kv == {"": "10.1.2.3:7100"} | ({} if outside == "10.1.2.3" else {"b": f"{outside}:7100"})
    spec = dict(pods(documents))[name]["spec"]
    assert spec.get("hostNetwork", False) is (across["mode"] == "hostNetwork")


def test_decode_workers_are_called_within_their_region_only() -> None:
    """What crosses is KV, on its fixed port."""
    name = "prfaas-decode-worker-h20"
    documents = rendered("b")
    found = environment(dict(pods(documents))[name], f"{name}-0", "10.2.3.4")
    assert found["PRFAAS_WORKER_RPC_ADVERTISE"] == "10.2.3.4:7000"
    assert found["PRFAAS_KV_ADVERTISE"] == f"=10.2.3.4:7100,a={name}-0.region-b.example.com:7100"
    balancer = of_kind(documents, "Service")[f"{name}-0"]
    assert [port["port"] for port in balancer["spec"]["ports"]] == [7100]


def test_each_pod_has_a_balancer_before_it_is_ready() -> None:
    """It checks its own advertised address first. An autoscaler's every pod has one."""
    name = "prfaas-prefill-worker-h200"
    services = of_kind(rendered("a"), "Service")
    for i in range(4):
        service = services[f"{name}-{i}"]
        assert service["spec"]["type"] == "LoadBalancer" and service["spec"]["publishNotReadyAddresses"] is True
        assert service["spec"]["selector"]["statefulset.kubernetes.io/pod-name"] == f"{name}-{i}"
        host = service["metadata"]["annotations"]["external-dns.alpha.kubernetes.io/hostname"]
        assert host == f"{name}-{i}.region-a.example.com"
    assert f"{name}-4" not in services
    scaled = {"prefillWorker": {"autoscaling": {"enabled": True, "maxReplicas": 6}}}
    assert f"{name}-5" in of_kind(rendered("a", scaled), "Service")


def test_pools_have_their_own_hardware_nodes_and_settings() -> None:
    """A pool takes what the component says, and overrides it."""
    values = {
        "prefillWorker": {
            "pools": {
                "h20": {
                    "hardware": "h20",
                    "replicaCount": 2,
                    "nodeSelector": {"gpu": "h20"},
                    "resources": {"limits": {"memory": "64Gi", "nvidia.com/gpu": 2}},
                    "config": {"kv": {"pool_bytes": 1073741824}},
                }
            }
        }
    }
    documents = rendered("a", values)
    sets = of_kind(documents, "StatefulSet")
    small, large = sets["prfaas-prefill-worker-h20"], sets["prfaas-prefill-worker-h200"]
    assert (small["spec"]["replicas"], large["spec"]["replicas"]) == (2, 4)
    assert small["spec"]["template"]["spec"]["nodeSelector"] == {"gpu": "h20"}
    assert container(small["spec"]["template"])["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert container(large["spec"]["template"])["resources"]["limits"]["nvidia.com/gpu"] == 8
    tables = {
        name: tomllib.loads(toml_of(documents, name))
        for name in ("prfaas-prefill-worker-h20", large["metadata"]["name"])
    }
    assert [table["worker"]["hardware"] for table in tables.values()] == ["h20", "h200"]
    assert [table["kv"]["pool_bytes"] for table in tables.values()] == [1 << 30, 64 << 30]


def test_a_drain_has_time() -> None:
    """However long the configuration lets it take."""
    graces = {}
    for drain_s in (30, 600):
        documents = rendered(
            "b", {"config": {"router": {"drain_timeout_s": drain_s}, "worker": {"drain_timeout_s": drain_s}}}
        )
        for name, pod in services_of_ours(documents):
            graces[name, drain_s] = pod["spec"]["terminationGracePeriodSeconds"]
    assert graces["prfaas-router", 30] == 65 and graces["prfaas-router", 600] == 635
    assert graces["prfaas-decode-worker-h20", 600] > 600
    assert graces["prfaas-cache-pool", 600] == 42


def test_routers_scale_by_an_autoscaler() -> None:
    documents = rendered("b")
    scaler = of_kind(documents, "HorizontalPodAutoscaler")
    assert scaler.keys() == {"prfaas-router"}
    assert (scaler["prfaas-router"]["spec"]["minReplicas"], scaler["prfaas-router"]["spec"]["maxReplicas"]) == (3, 12)
    off = rendered("b", {"router": {"autoscaling": {"enabled": False}}})
    assert not of_kind(off, "HorizontalPodAutoscaler")
    assert of_kind(off, "Deployment")["prfaas-router"]["spec"]["replicas"] == 3


def test_an_upgrade_of_routers_takes_none_away_first() -> None:
    strategy = of_kind(rendered("b"), "Deployment")["prfaas-router"]["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}


def test_each_router_process_is_scraped() -> None:
    endpoints = of_kind(rendered("b", EVERYTHING), "ServiceMonitor")["prfaas-router"]["spec"]["endpoints"]
    assert [each["port"] for each in endpoints] == ["metrics", "metrics-1", "metrics-2"]


def test_cert_manager_makes_a_certificate_of_each_role() -> None:
    """Under the name of the secret that pods mount."""
    documents = rendered("b")
    made = of_kind(documents, "Certificate")
    for _, pod in services_of_ours(documents):
        secrets = [volume["secret"]["secretName"] for volume in pod["spec"]["volumes"] if volume["name"] == "tls"]
        role = pod["metadata"]["labels"]["role"]
        assert f"{role}.prfaas.internal" in made[secrets[0]]["spec"]["dnsNames"]
    assert not of_kind(rendered(None), "Certificate")


def test_certificates_are_renewed_before_the_alert_on_them() -> None:
    """PrfaasCertificateExpires fires below a week."""
    for certificate in of_kind(rendered("b"), "Certificate").values():
        kept = int(certificate["spec"]["renewBefore"].removesuffix("h"))
        assert 7 * 24 < kept < int(certificate["spec"]["duration"].removesuffix("h"))


def test_without_mtls_no_certificate_is_asked_for() -> None:
    """And the configuration says that it is meant."""
    off = {"security": {"mode": "off", "certManager": {"enabled": False}}, "store": {"tls": {"enabled": False}}}
    documents = rendered("b", off)
    assert not of_kind(documents, "Certificate")
    for name, pod in services_of_ours(documents):
        assert not [volume for volume in pod["spec"]["volumes"] if volume["name"] == "tls"]
        assert tomllib.loads(toml_of(documents, name))["security"] == {"mode": "off", "allow_plain": True}


def test_other_regions_may_call_what_crosses_and_nothing_else() -> None:
    crossing = {
        "prfaas-etcd": {"client"},
        "prfaas-decode-worker-h20": {"kv"},
        "prfaas-cache-pool": {"rpc"},
        "prfaas-router": set(),
    }
    for name, policy in of_kind(rendered("b"), "NetworkPolicy").items():
        open_ports = {
            port["port"]
            for rule in policy["spec"]["ingress"]
            for port in rule["ports"]
            if any("ipBlock" in peer for peer in rule.get("from", []))
        }
        assert open_ports == crossing[name], name


def test_dashboards_and_rules_ship_whole() -> None:
    """Their own templates for Grafana and Prometheus are not helm's."""
    documents = rendered("b")
    rules = of_kind(documents, "PrometheusRule")
    dashboards = [name for name in of_kind(documents, "ConfigMap") if "-dashboard-" in name]
    assert rules and dashboards
    assert any("$labels" in str(rule) or "$value" in str(rule) for rule in rules.values())
    none = rendered("b", {"prometheusRule": {"enabled": False}, "dashboards": {"enabled": False}})
    assert not of_kind(none, "PrometheusRule")
    assert not [name for name in of_kind(none, "ConfigMap") if "-dashboard-" in name]


def test_the_smoke_test_asks_all_that_the_region_has() -> None:
    asked = container(dict(pods(rendered("b")))["prfaas-smoke"])["args"]
    assert "--api=http://prfaas-router.serving.svc:8000" in asked
    assert sum(argument.startswith("--ready=") for argument in asked) == 2
    assert not any(
        argument.startswith("--api") for argument in container(dict(pods(rendered("a")))["prfaas-smoke"])["args"]
    )


def test_names_of_any_length_fit() -> None:
    """A StatefulSet's own labels have its name and eleven characters more."""
    pools = {"twelve-chars": {}}
    values = {"nameOverride": "a-name-of-more-than-forty-characters-in-all", "prefillWorker": {"pools": pools}}
    for name in of_kind(rendered("a", values), "StatefulSet"):
        assert len(name) <= 52, name


def test_notes_say_what_comes_next() -> None:
    said = helm("install", "prfaas", str(CHART), "-n", "serving", "--dry-run=client", "-f", str(region_file("b")))
    notes = said.partition("\nNOTES:\n")[2]
    for words in (
        "3 to 12 x router",
        "8 x decode-worker",
        "port-forward svc/prfaas-router",
        "helm test -n serving prfaas",
    ):
        assert words in notes


def test_the_chart_has_the_version_of_the_product() -> None:
    """Its images are tagged with it."""
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == VERSION


#: Values, and what the refusal must name.
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("b", {"routers": {}}, "routers"),
    ("b", {"router": {"replicas": 3}}, "replicas"),
    ("b", {"router": {"replicaCount": "three"}}, "replicaCount"),
    ("b", {"router": {"replicaCount": -1}}, "replicaCount"),
    ("b", {"router": {"image": {"tag": "latest"}}}, "tag"),
    ("b", {"router": {"image": {"digest": "sha256:short"}}}, "digest"),
    ("b", {"router": {"ports": {"http": 70000}}}, "http"),
    ("b", {"router": {"ports": {"grpc": 7000}}}, "grpc"),
    ("b", {"router": {"service": {"type": "ExternalName"}}}, "type"),
    ("b", {"router": {"podSecurityContext": {"runAsUser": 0}}}, "runAsUser"),
    ("b", {"router": {"securityContext": {"privileged": True}}}, "privileged"),
    ("b", {"defaults": {"securityContext": {"readOnlyRootFilesystem": False}}}, "readOnlyRootFilesystem"),
    ("b", {"router": {"resources": {"limits": {"memory": "4 gigabytes"}}}}, "memory"),
    ("b", {"router": {"pools": {"x": {}}}}, "pools"),
    ("b", {"etcd": {"replicaCount": 2}}, "replicaCount"),
    ("b", {"decodeWorker": {"role": "decoder"}}, "role"),
    ("b", {"decodeWorker": {"pools": {"a-name-too-long": {}}}}, "a-name-too-long"),
    ("b", {"decodeWorker": {"pools": {"h20": {"hardwares": "h20"}}}}, "h20"),
    ("b", {"config": {"routing": {"treshold_tokens": 1}}}, "treshold_tokens"),
    ("b", {"config": {"routing": {"mode": "sometimes"}}}, "mode"),
    ("b", {"config": {"routing": {"line_share": 2}}}, "line_share"),
    ("b", {"config": {"store": {"password": "hunter2"}}}, "password"),
    ("b", {"config": {"router": {"admin_key": "hunter2"}}}, "admin_key"),
    ("b", {"config": {"kv": {"port": 7100}}}, "port"),
    ("b", {"security": {"mode": "tls"}}, "mode"),
    ("b", {"store": {"endpoints": ["http://etcd:2379"]}}, "endpoints"),
    ("b", {"regions": [{"name": "b", "roles": ["decoder"]}]}, "roles"),
    ("b", {"regions": [{"name": "b", "roles": ["router"], "cidrs": ["10.0.0.0"]}]}, "cidrs"),
    ("b", {"model": {"folder": "/models/m"}}, "folder"),
    ("b", {"region": "c"}, "is none of regions"),
    ("b", {"cluster": {"pdRegion": "c"}}, "is none of regions"),
    ("a", {"cluster": {"pdRegion": "a"}}, "decode workers"),
    ("b", {"regions": [{"name": "a", "roles": ["router"]}, {"name": "b", "roles": ["etcd"]}]}, "only cluster.pdRegion"),
    ("a", {"store": {"endpoints": []}}, "store.endpoints"),
    ("b", {"regions": [{"name": "b", "roles": ["router"]}, {"name": "b", "roles": ["etcd"]}]}, "twice"),
    ("b", {"regions": [{"name": "b", "roles": ["prefillWorker", "etcd"]}]}, "decode workers"),
    ("b", {"defaults": {"acrossRegions": {"domain": ""}}}, "acrossRegions.domain"),
    ("b", {"router": {"terminationGracePeriodSeconds": 20}}, "terminationGracePeriodSeconds"),
    ("b", {"cachePool": {"persistence": {"enabled": False}, "config": {"pool": {"store": "disk"}}}}, "persistence"),
    ("b", {"security": {"mode": "off"}}, "store.tls.existingSecret"),
]


@pytest.mark.parametrize(("region", "values", "named"), BAD)
def test_what_makes_no_sense_is_refused(region: str, values: dict[str, Any], named: str) -> None:
    """Before anything is installed, with a message that names it."""
    with pytest.raises(Refused) as refused:
        template(region, values)
    assert named in str(refused.value)
