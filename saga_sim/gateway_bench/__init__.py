"""What `saga bench gateway` runs beside a gateway: a server, a client, a bare pass-through."""
