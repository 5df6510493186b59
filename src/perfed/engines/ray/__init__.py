"""Clients in banks, on workers of one machine or of a cluster; see docs/engines.md."""

from perfed.engines.ray.cluster import session
from perfed.engines.ray.engine import RayEngine

__all__ = ["RayEngine", "session"]
