"""Check the Helm chart and the plain manifests without a cluster; the same checks are tests (tests/deploy).

    python tools/helm_check.py [--update]

Every example is linted and rendered with every Helm that is found, and what comes out must be the same, valid by the
schemas of Kubernetes and KubeRay, readable by kvferry's own loader, and equal to the golden files. `--update` writes
the golden files, and the part of values.schema.json that comes from kvferry's configuration.

Helms: $KVFERRY_HELM (programs, separated by `:`), those that tools/fetch_helm.py fetched, the one on PATH.
Schemas of custom resources: tools/resource_schemas, and the CRDs below $KVFERRY_SCHEMAS (or ../shared/data), which say
more.
"""

from __future__ import annotations

import argparse
import base64
import concurrent.futures
import copy
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cel_rules
import chart_rules
import jsonschema
import kubernetes_validate
import yaml

from kvferry import config as configuration
from kvferry.arguments.vllm_arguments import OF_ROLES, REFUSED
from kvferry.config import ClusterConfig, RoleEngineConfig

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "deploy" / "helm" / "kvferry"
EXAMPLES = CHART / "examples"
MANIFESTS = ROOT / "deploy" / "ray"
GOLDEN = ROOT / "tests" / "deploy" / "golden"
RESOURCE_SCHEMAS = ROOT / "tools" / "resource_schemas"
FETCHED = ROOT / ".venv" / "helm"

KUBERNETES_VERSIONS = ("1.30", "1.37")
RELEASE, NAMESPACE = "trial", "serving"

# What the chart decides about kvferry's configuration, and its values therefore do not take.
CHART_DECIDES: Mapping[str, Sequence[str]] = {
    "": ("insecure", "prefill", "decode", "metrics"),
    "engine": ("side_channel_host",),
    "worker": ("host", "tls"),
    "gateway": ("replicas", "num_cpus", "resources", "host", "http_port", "grpc_port", "keys_file", "tls", "linger_s"),
    "membership": ("endpoints", "ca_file", "cert_file", "key_file", "user", "password_file"),
    "tier": ("enabled", "cpu_gib", "volumes", "host", "encryption_keys_file"),
}

Document = dict[str, Any]


class CheckFailed(Exception):
    """A check failed; the message says where and how."""


@dataclass(frozen=True)
class Helm:
    program: Path
    version: str  # without the v: 4.3.1

    @property
    def major(self) -> int:
        return int(self.version.partition(".")[0])

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        # Nothing of the caller's Helm: no plugins, no repositories. It ends before Go would need to collect garbage.
        environ = {
            "PATH": os.environ.get("PATH", ""),
            "HOME": "/nonexistent",
            "HELM_PLUGINS": "/nonexistent",
            "GOGC": "off",
        }
        return subprocess.run([str(self.program), *arguments], capture_output=True, text=True, env=environ)

    def lint(self, values: Path | None) -> None:
        """Raises CheckFailed with what Helm says."""
        result = self.run("lint", "--strict", str(CHART), *_values(values), "--namespace", NAMESPACE)
        if result.returncode:
            raise CheckFailed(f"helm {self.version} lint: {result.stdout}{result.stderr}")

    def template(self, *arguments: str, values: Path | None = None) -> str:
        """Return Helm's rendering. Raises CheckFailed with Helm's message."""
        result = self.run("template", RELEASE, str(CHART), "--namespace", NAMESPACE, *_values(values), *arguments)
        if result.returncode:
            raise CheckFailed(result.stderr.strip())
        return result.stdout

    def documents(self, *arguments: str, values: Path | None = None) -> list[Document]:
        return documents(self.template(*arguments, values=values))

    def notes(self, *arguments: str, values: Path | None = None) -> str:
        """NOTES.txt as the user sees it. Raises CheckFailed."""
        result = self.run(
            *("install", RELEASE, str(CHART), "--dry-run=client", "--namespace", NAMESPACE),
            *_values(values),
            *arguments,
        )
        if result.returncode:
            raise CheckFailed(result.stderr.strip())
        return result.stdout.partition("NOTES:\n")[2]


def _values(file: Path | None) -> list[str]:
    # The defaults name no registry, which the chart refuses.
    return ["--set", "image.registry=registry.example"] if file is None else ["--values", str(file)]


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Values of several layers, later ones over earlier ones, as Helm merges them."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
            result[key] = merged(result[key], value) if both else copy.deepcopy(value)
    return result


def documents(text: str) -> list[Document]:
    """The objects of a rendering, in an order of their own: Helm's differs from version to version."""
    found = [each for each in yaml.load_all(text, Loader=yaml.CSafeLoader) if each]
    return sorted(found, key=lambda each: (each["kind"], each["metadata"]["name"], hooks(each)))


def hooks(document: Document) -> str:
    """When Helm makes an object that is no part of the release's manifest; empty for one that is."""
    return str(document["metadata"].get("annotations", {}).get("helm.sh/hook", ""))


@functools.cache
def helms() -> tuple[Helm, ...]:
    """Every Helm found, one per version, the newest first."""
    programs = [Path(each) for each in os.environ.get("KVFERRY_HELM", "").split(os.pathsep) if each]
    programs += sorted(FETCHED.glob("*/helm"))
    if on_path := shutil.which("helm"):
        programs.append(Path(on_path))
    found = {}
    for program in programs:
        answer = subprocess.run([program, "version", "--short"], capture_output=True, text=True, check=True).stdout
        version = answer.strip().lstrip("v").partition("+")[0]
        found.setdefault(version, Helm(program, version))
    return tuple(sorted(found.values(), key=lambda helm: [int(part) for part in helm.version.split(".")], reverse=True))


def examples() -> list[Path]:
    return sorted(EXAMPLES.glob("*.yaml"))


# Valid?


def validate(document: Document) -> None:
    """Raises CheckFailed for an object that no schema knows, or that is not as its schema says."""
    _validate(json.dumps(document))


@functools.cache  # what several Helms render alike is looked at once
def _validate(text: str) -> None:
    document: Document = json.loads(text)
    where = f"{document.get('kind')}/{document.get('metadata', {}).get('name')}"
    api_version = str(document.get("apiVersion", ""))
    schemas = resource_schemas().get((api_version, str(document.get("kind"))))
    if schemas is None:
        for version in KUBERNETES_VERSIONS:
            try:
                kubernetes_validate.validate(document, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                raise CheckFailed(f"{where}: Kubernetes {version}: {_path(error)}: {error.message}") from None
            except kubernetes_validate.SchemaNotFoundError:
                raise CheckFailed(f"{where}: no schema knows {api_version} {document.get('kind')}") from None
        return
    for schema in schemas:
        for error in jsonschema.Draft202012Validator(schema).iter_errors(document):
            raise CheckFailed(f"{where}: {_path(error)}: {error.message}")
    for schema in rule_schemas()[api_version, str(document.get("kind"))]:
        for fault in cel_rules.faults(schema, document):
            raise CheckFailed(f"{where}: {fault}")
    for path, template in _pod_templates(document):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": template["spec"]}
        try:
            validate(pod)
        except CheckFailed as error:
            raise CheckFailed(f"{where}: {path}: {error}") from None


def _path(error: Any) -> str:
    return ".".join(str(part) for part in error.absolute_path) or "(root)"


def _pod_templates(document: Document) -> Iterator[tuple[str, Document]]:
    """Pods inside of custom resources, which are validated as pods are."""
    spec = document.get("spec", {})
    cluster = spec.get("rayClusterConfig", spec)
    if "headGroupSpec" in cluster:
        yield "headGroupSpec", cluster["headGroupSpec"]["template"]
        for group in cluster.get("workerGroupSpecs", []):
            yield f"workerGroupSpecs[{group['groupName']}]", group["template"]


@functools.cache
def resource_schemas() -> dict[tuple[str, str], list[Document]]:
    """(apiVersion, kind) -> the schemas that an object of it must satisfy."""
    found: dict[tuple[str, str], list[Document]] = {}
    for key, schemas in rule_schemas().items():
        found[key] = [schemas[0], *map(_closed, schemas[1:])]
    return found


@functools.cache
def rule_schemas() -> dict[tuple[str, str], list[Document]]:
    """(apiVersion, kind) -> the schemas whose rules in CEL hold for it: the project's own first, then those of CRDs."""
    found: dict[tuple[str, str], list[Document]] = {}
    for file in sorted(RESOURCE_SCHEMAS.glob("*.json")):
        schema = json.loads(file.read_text())
        properties = schema["properties"]
        found[properties["apiVersion"]["const"], properties["kind"]["const"]] = [schema]
    for file in sorted(crd_folder().rglob("*.yaml")) if crd_folder().is_dir() else ():
        definition = yaml.load(file.read_text(), Loader=yaml.CSafeLoader)
        if not isinstance(definition, dict) or definition.get("kind") != "CustomResourceDefinition":
            continue
        spec = definition["spec"]
        for version in spec["versions"]:
            key = (f"{spec['group']}/{version['name']}", spec["names"]["kind"])
            if key in found:
                found[key].append(version["schema"]["openAPIV3Schema"])
    return found


def crd_folder() -> Path:
    return Path(os.environ.get("KVFERRY_SCHEMAS") or ROOT.parent / "shared" / "data")


def _closed(schema: Document) -> Document:
    """A CRD's schema as JSON schema: unknown keys are errors, as the API server would silently drop them."""
    closed = dict(schema)
    if closed.pop("x-kubernetes-int-or-string", False):
        return {"type": ["integer", "string"]}
    if closed.get("nullable"):
        return {}
    for key in ("items", "additionalProperties"):
        if isinstance(closed.get(key), dict):
            closed[key] = _closed(closed[key])
    if "properties" in closed:
        closed["properties"] = {name: _closed(each) for name, each in closed["properties"].items()}
        if not closed.get("x-kubernetes-preserve-unknown-fields") and "additionalProperties" not in closed:
            closed["additionalProperties"] = False
    # The API server's own: any metadata may stand there.
    if "metadata" in closed.get("properties", {}):
        closed["properties"]["metadata"] = {"type": "object"}
    return closed


def serve_config(document: Document) -> Document:
    """A RayService's serveConfigV2, read."""
    config: Document = yaml.safe_load(document["spec"]["serveConfigV2"])
    return config


def parse_configs(rendered: Sequence[Document]) -> list[ClusterConfig]:
    """Every configuration of kvferry in a rendering, through its own loader. Raises ConfigError."""
    configs = []
    for document in rendered:
        if document["kind"] == "ConfigMap" and "kvferry.yaml" in document["data"]:
            configs.append(configuration.parse(yaml.safe_load(document["data"]["kvferry.yaml"])))
        if document["kind"] == "RayService":
            for application in serve_config(document)["applications"]:
                configs.append(configuration.parse(application["args"]["config"]))
    return configs


# The same as before?


def redacted(rendered: Sequence[Document]) -> list[Document]:
    """Without what each rendering makes anew: keys, certificates, passwords."""
    result = copy.deepcopy(list(rendered))
    for document in result:
        if document["kind"] == "Secret" and "data" in document:
            document["data"] = {key: f"({_what(value)})" for key, value in sorted(document["data"].items())}
    return result


def _what(value: str) -> str:
    content = base64.b64decode(value, validate=True).decode()
    label = re.match(r"-----BEGIN ([A-Z ]+)-----", content)
    return f"{label[1].lower()}" if label else re.sub(r"[A-Za-z0-9]{32,}|(?<=-)[0-9a-f]{8}\b", "...", content.rstrip())


def golden_text(rendered: Sequence[Document]) -> str:
    return _dump(redacted(rendered))


def golden_file(example: Path) -> Path:
    return GOLDEN / f"{example.stem}.yaml"


# The part of the schema that is kvferry's


def schema_text() -> str:
    """values.schema.json with the definitions that follow from kvferry's configuration."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    schema["$defs"]["config"] = config_schema()
    schema["$defs"]["roleEngine"] = _with_names(_plain(RoleEngineConfig.model_json_schema(), {}))
    # kvferry checks the values, and vLLM knows further names.
    schema["$defs"]["arguments"] = {"type": "object", "properties": dict.fromkeys(REFUSED, False)}
    schema["$defs"]["roleArguments"] = {
        "type": "object",
        "properties": {name: {} for name in OF_ROLES},
        "additionalProperties": False,
    }
    return json.dumps(schema, indent=2) + "\n"


def config_schema() -> Document:
    """Schema of the chart's value `config`: kvferry's configuration without settings that the chart decides."""
    whole = ClusterConfig.model_json_schema()
    plain: Document = _plain(whole, whole["$defs"])
    for section, keys in CHART_DECIDES.items():
        here = plain["properties"][section]["properties"] if section else plain["properties"]
        for key in keys:
            del here[key]
    # Refused by the templates, in words: the chart makes no pods for them.
    plain["properties"]["pools"] = {"type": "object"}
    named: Document = _with_names(plain)
    engine = copy.deepcopy(named["properties"]["engine"])
    for key in configuration.ENGINE_OF_THE_CLUSTER:
        engine["properties"].pop(key, None)
    named["properties"]["models"]["items"]["properties"]["engine"] = engine
    return named


def _with_names(schema: Any) -> Any:
    """The schema with the names that each `args` in it takes."""
    if isinstance(schema, list):
        return [_with_names(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    named = {key: _with_names(each) for key, each in schema.items()}
    if isinstance(named.get("properties"), dict) and "args" in named["properties"]:
        is_of_role = "proof" not in named["properties"]
        named["properties"]["args"] = {"$ref": f"#/$defs/{'roleArguments' if is_of_role else 'arguments'}"}
    return named


def _plain(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Without references, titles, descriptions and defaults."""
    if isinstance(schema, list):
        return [_plain(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _plain(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    plain = {
        key: _plain(value, definitions)
        for key, value in schema.items()
        if key not in ("title", "default", "description", "format", "$defs", "properties")
    }
    if "properties" in schema:
        plain["properties"] = {name: _plain(each, definitions) for name, each in schema["properties"].items()}
    return plain


# For those who do without Helm


def manifest_texts(rendered: Sequence[Document]) -> dict[str, str]:
    """File name -> content of the plain manifests, from a rendering of deploy/ray/values.yaml."""
    (service,) = (each for each in rendered if each["kind"] == "RayService")
    entrances = [
        each
        for each in rendered
        if each["kind"] in ("Service", "NetworkPolicy", "PodDisruptionBudget") and "helm.sh/hook" not in str(each)
    ]
    cluster = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": service["metadata"],
        "spec": service["spec"]["rayClusterConfig"],
    }
    contents = {
        "rayservice.yaml": [service, *entrances],
        "raycluster.yaml": [cluster, *entrances],
        "serve.yaml": [serve_config(service)],
    }
    return {name: _MADE + _dump(_without_helm(content)) for name, content in contents.items()}


_MADE = "# Made from values.yaml by tools/helm_check.py --update; README.md says what it needs.\n"
_LABELS_OF_HELM = ("helm.sh/chart", "app.kubernetes.io/managed-by")


class _Dumper(yaml.SafeDumper):
    """Text of several lines as text of several lines, and nothing by reference."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def _dump(content: Sequence[Any]) -> str:
    return yaml.dump_all(content, Dumper=_Dumper, sort_keys=False, width=160)


def _without_helm(content: Any) -> Any:
    if isinstance(content, list):
        return [_without_helm(each) for each in content]
    if isinstance(content, dict):
        return {key: _without_helm(value) for key, value in content.items() if key not in _LABELS_OF_HELM}
    return content


# As a command


def check(*, update: bool) -> list[str]:
    """Runs everything; returns the faults."""
    faults = []
    found = helms()
    majors = {helm.major for helm in found}
    print("Helm: " + (", ".join(f"{helm.version} ({helm.program})" for helm in found) or "none"))
    faults += [
        f"no Helm {major} was found: run tools/fetch_helm.py, or name one in KVFERRY_HELM" for major in {3, 4} - majors
    ]
    has_crds = any(len(schemas) > 1 for schemas in resource_schemas().values())
    print(f"KubeRay's CRDs: {crd_folder() if has_crds else 'not found; tools/resource_schemas alone'}")
    num_rules = sum(1 for schemas in rule_schemas().values() for schema in schemas for _ in cel_rules.rules(schema))
    print(f"{num_rules} rules in CEL of {sum(map(len, rule_schemas().values()))} schemas of custom resources")
    if update:
        (CHART / "values.schema.json").write_text(schema_text())
    elif (CHART / "values.schema.json").read_text() != schema_text():
        faults.append("values.schema.json: `config` is not what kvferry's configuration says; run with --update")
    jobs = [(helm, example) for example in [None, *examples()] for helm in found]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for fault in pool.map(lambda job: _check_example(*job, update=update), jobs):
            faults += fault
    if found:
        faults += _check_manifests(found[0], update=update)
    print(f"{len(jobs)} renderings, {len(faults)} faults")
    return faults


def _check_example(helm: Helm, example: Path | None, *, update: bool) -> list[str]:
    name = example.name if example is not None else "values.yaml"
    try:
        helm.lint(example)
        rendered = helm.documents(values=example)
        for document in rendered:
            validate(document)
        parse_configs(rendered)
        if faults := chart_rules.faults(rendered):
            return [f"{name}, Helm {helm.version}: {fault}" for fault in faults]
        if example is None:
            return []
        file, text = golden_file(example), golden_text(rendered)
        if update:
            if helm is helms()[0]:
                GOLDEN.mkdir(exist_ok=True)
                file.write_text(text)
        elif not file.exists() or file.read_text() != text:
            return [f"{name}, Helm {helm.version}: differs from {file.relative_to(ROOT)}; --update writes it"]
    except Exception as error:
        return [f"{name}, Helm {helm.version}: {error}"]
    return []


def _check_manifests(helm: Helm, *, update: bool) -> list[str]:
    faults = []
    try:
        texts = manifest_texts(helm.documents(values=MANIFESTS / "values.yaml"))
        for name, text in texts.items():
            file = MANIFESTS / name
            if update:
                file.write_text(text)
            elif not file.exists() or file.read_text() != text:
                faults.append(f"{file.relative_to(ROOT)} is not what values.yaml gives; --update writes it")
            if name != "serve.yaml":
                rendered = documents(text)
                for document in rendered:
                    validate(document)
                parse_configs(rendered)
                faults += [f"{file.relative_to(ROOT)}: {fault}" for fault in chart_rules.faults(rendered)]
    except Exception as error:
        faults.append(f"deploy/ray: {error}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the Helm chart and the plain manifests, offline.")
    parser.add_argument("--update", action="store_true", help="write golden files and the schema's generated part")
    faults = check(update=parser.parse_args().update)
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
