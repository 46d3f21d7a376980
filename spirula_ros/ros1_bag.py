"""ROS 1 .bag files as if they were of ROS 2: the messages that the intake takes differ in the header's `seq` and the alignment on the wire alone."""
from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, Collection, Iterator

from rosbags.rosbag1 import Reader

from .bag_files import BagError, Connection

RENAMED = {"tf/msg/tfMessage": "tf2_msgs/msg/TFMessage"}   # of ROS Electric and before; the same fields
MAGIC = b"#ROSBAG V2.0\n"


class Ros1Reader:
    """An opened .bag, with the interface of rosbags' rosbag2 Reader as far as `bags` uses it; messages come as CDR. Uncompressed, bz2 and lz4 chunks.
    Raises BagError."""

    def __init__(self, path: Path, types: Any):
        """types: the rosbags store of the ROS 2 definitions, with the types that messages() is asked for."""
        self._types = types
        if (cut := _complaint(path)):
            raise BagError(f"{path}: {cut}")
        try:
            self._reader = Reader(path)
            self._reader.open()
        except Exception as error:  # rosbags lets struct, unicode and decompression errors through
            raise BagError(f"{path}: cannot be read ({str(error) or type(error).__name__}); `rosbag reindex` of ROS 1 repairs some damage") from error
        self.connections = [Connection(c.id, c.topic, RENAMED.get(c.msgtype, c.msgtype), c.msgcount) for c in self._reader.connections]
        self.start_time, self.end_time = (self._reader.start_time, self._reader.end_time) if self._reader.message_count else (0, 0)

    def messages(self, connections: Collection[Connection]) -> Iterator[tuple[Connection, int, memoryview]]:
        wanted = {c.id: c for c in connections}
        for connection, recv_ns, raw in self._reader.messages([c for c in self._reader.connections if c.id in wanted]):
            found = wanted[connection.id]
            yield found, recv_ns, self._types.ros1_to_cdr(raw, found.msgtype)

    def close(self) -> None:
        self._reader.close()


def _complaint(path: Path) -> str:
    """'' or what is wrong with the file as a whole. The bag header comes first: fields `name=value`, of them index_pos, where the index begins."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(4096)
    if not head.startswith(MAGIC):
        return "not a ROS 1 bag of format 2.0" + ("; `rosbag fix` of ROS 1 makes one" if head.startswith(b"#ROSBAG") else ", whatever its name says; copy it again")
    if (at := head.find(b"index_pos=")) < 0 or len(head) < at + 18:
        return f"cut off at {size} bytes, in its header; copy it again"
    index, = struct.unpack_from("<Q", head, at + 10)
    if index == 0:
        return "it has no index, its recorder did not finish; run `rosbag reindex` of ROS 1 on it"
    return f"cut off at {size} bytes, its index begins at {index}; copy it again, or run `rosbag reindex` of ROS 1 on it" if size < index else ""
