// Package loopback decides whether a connection stays on this host's loopback interface.
//
// Callers on loopback have more rights because no other host can reach a loopback endpoint. The remote address alone
// does not show that the endpoint is on loopback: a local process may bind 127.0.0.1 as its source and connect to the
// host's public address, where other rules apply. So both addresses of a connection must be loopback addresses
// (127.0.0.0/8 or ::1).
//
// It does not depend on a transport: package rest uses it for HTTP requests, package kv/etcdrpc for gRPC calls.
package loopback

import "net"

// Both reports whether the local and the remote address of a TCP connection are loopback addresses. It returns false if
// an address is nil or not a TCP address.
func Both(local, remote net.Addr) bool { return is(local) && is(remote) }

func is(a net.Addr) bool {
	tcp, ok := a.(*net.TCPAddr)
	return ok && tcp.IP.IsLoopback()
}
