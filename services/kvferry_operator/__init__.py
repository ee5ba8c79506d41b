"""Takes what a Helm release says to its Ray cluster: counts, images, resources and certificates, without a second one.

Why KubeRay does not: docs/adr/0017-a-rollout-beside-kuberay.md.
"""

__version__ = "0.1.0"
