package lab

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
)

// Networks returns a client of the network service, on the connection that all clients of g share.
func (g *GRPC) Networks() networkv1.NetworkServiceClient {
	return networkv1.NewNetworkServiceClient(g.conn)
}

// RunInGuest runs a shell script in the small guest, over HTTP to its address in a network namespace, which is that of
// its VPC. It returns the output, and an error if the exit status is not 0.
func RunInGuest(ctx context.Context, namespace, address, script string) (string, error) {
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, target string) (net.Conn, error) {
		return DialIn(ctx, namespace, target)
	}}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+address+"/cgi-bin/run", bytes.NewReader([]byte(script+"\n")))
	if err != nil {
		return "", err
	}
	reply, err := transport.RoundTrip(request)
	if err != nil {
		return "", fmt.Errorf("run in the guest at %s: %w", address, err)
	}
	defer reply.Body.Close()
	text, err := io.ReadAll(io.LimitReader(reply.Body, 1<<20))
	if err != nil {
		return string(text), fmt.Errorf("run in the guest at %s: %w", address, err)
	}
	// The output may end without a newline.
	said, ok := strings.CutSuffix(string(text), "rc=0\n")
	if !ok {
		return string(text), fmt.Errorf("run %q in the guest at %s: %q", script, address, text)
	}
	return said, nil
}
