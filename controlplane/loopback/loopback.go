// Package loopback decides whether a connection stays on this host's loopback interface.
//
// What loopback grants, it grants because no other host can reach the endpoint. The remote address alone does not prove
// that: a local process may bind 127.0.0.1 as its source and connect to the host's public address, where the port has
// other rules. So both addresses of a connection must be loopback addresses (127.0.0.0/8 or ::1).
//
// It knows no transport: package rest asks for HTTP requests, package kv/etcdrpc for gRPC calls.
package loopback

import "net"

// Both reports whether the local and the remote address of a TCP connection are loopback addresses. An address that is
// unknown or of another network is not.
func Both(local, remote net.Addr) bool { return is(local) && is(remote) }

func is(a net.Addr) bool {
	tcp, ok := a.(*net.TCPAddr)
	return ok && tcp.IP.IsLoopback()
}
