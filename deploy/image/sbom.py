"""Add Debian packages to cyclonedx-py's bill of materials and validate it.

python sbom.py PYTHON.json DPKG-STATUS RESULT.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote


def debian_components(status: str) -> Iterator[dict[str, Any]]:
    """One component per installed package of dpkg's status file."""
    for paragraph in status.split("\n\n"):
        fields = dict(
            line.split(": ", 1) for line in paragraph.splitlines() if ": " in line and not line.startswith(" ")
        )
        if not fields.get("Status", "").endswith(" installed"):
            continue
        name, version, architecture = fields["Package"], fields["Version"], fields["Architecture"]
        purl = f"pkg:deb/debian/{quote(name)}@{quote(version, safe='')}?arch={architecture}"
        yield {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def merged(python: dict[str, Any], status: str) -> dict[str, Any]:
    """The bill of both, in an order that two builds share."""
    debian = sorted(debian_components(status), key=lambda component: component["purl"])
    # Where a wheel lay on the machine of the build is not a property of the image.
    for component in python["components"]:
        references = [
            reference
            for reference in component.get("externalReferences", [])
            if not reference["url"].startswith("file:")
        ]
        if references:
            component["externalReferences"] = references
        else:
            component.pop("externalReferences", None)
    return python | {"components": [*python["components"], *debian]}


def main() -> int:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    python, status, result = map(Path, sys.argv[1:])
    bill = merged(json.loads(python.read_text(encoding="utf-8")), status.read_text(encoding="utf-8"))
    text = json.dumps(bill, indent=1) + "\n"
    version = SchemaVersion.from_version(bill["specVersion"])
    if (error := JsonStrictValidator(version).validate_str(text)) is not None:
        print(f"not a valid CycloneDX document: {error}", file=sys.stderr)
        return 1
    result.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
