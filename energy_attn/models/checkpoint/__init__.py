"""Checkpoints: folders of configurations and safetensors."""
