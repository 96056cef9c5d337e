#!/bin/sh
# paho-mqtt 2.2.0 (PyPI), the client of Zuul's reporter for MQTT: a message that is published without a connection has the code
# MQTT_ERR_NO_CONN, and is_published() and wait_for_publish() raise RuntimeError: "Message publish failed: The client is not
# currently connected". With QoS 1 or 2, the message is queued nevertheless, and sent after the next connection: a caller
# that publishes it again sends it twice. is_published() raises even after on_publish has confirmed the message. With QoS
# 0, which has the same code and error, the message is lost.
# Seen: "QoS 0: RuntimeError, received 0; QoS 1: RuntimeError, again MQTT_ERR_SUCCESS, received 2, confirmed 2; is_published of the
# first: RuntimeError" (on one line).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check paho-mqtt==2.2.0
cat >"$work/run.py" <<'END'
import socket
import struct
import threading
import time

import paho.mqtt.client as mqtt

received = []


def read(stream, size):
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


def serve(connection):
    """Accept a client, and confirm each of its messages."""
    stream = connection.makefile("rb")
    try:
        while True:
            head, length = read(stream, 2)
            assert length < 128
            packet = read(stream, length)
            if head >> 4 == 1:
                connection.sendall(b"\x20\x02\x00\x00")
            elif head >> 4 == 3:
                (size,) = struct.unpack(">H", packet[:2])
                rest = packet[2 + size :]
                if head & 6:
                    received.append(rest[2:])
                    connection.sendall(b"\x40\x02" + rest[:2])
                else:
                    received.append(rest)
    except (EOFError, OSError):
        pass


def published(info):
    """Return the outcome of a message as its object says it."""
    try:
        return info.is_published()
    except RuntimeError as error:
        assert "Message publish failed" in str(error)
        return type(error).__name__


server = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=lambda: serve(server.accept()[0]), daemon=True).start()
client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2)
confirmed = []
client.on_publish = lambda _client, _data, mid, _reason, _properties: confirmed.append(mid)
zero = client.publish("zuul", b"zero", qos=0)
first = client.publish("zuul", b"one", qos=1)
outcomes = published(zero), published(first)
connected = threading.Event()
client.on_connect = lambda *_arguments: connected.set()
client.connect("127.0.0.1", server.getsockname()[1])
client.loop_start()
assert connected.wait(30)
again = client.publish("zuul", b"one", qos=1)
again.wait_for_publish(30)
end = time.monotonic() + 30
while len(confirmed) < 2 and time.monotonic() < end:
    time.sleep(0.05)
print(
    f"QoS 0: {outcomes[0]}, received {received.count(b'zero')}; QoS 1: {outcomes[1]}, again {again.rc.name}, "
    f"received {received.count(b'one')}, confirmed {len(confirmed)}; is_published of the first: {published(first)}"
)
END
"$work/venv/bin/python" "$work/run.py" | tee "$work/seen"
seen='QoS 0: RuntimeError, received 0; QoS 1: RuntimeError, again MQTT_ERR_SUCCESS, received 2, confirmed 2'
grep -qxF "$seen; is_published of the first: RuntimeError" "$work/seen"
