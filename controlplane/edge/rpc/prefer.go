package rpc

import (
	"context"
	"strings"

	"google.golang.org/grpc/metadata"
)

// RespondAsync reports whether the caller prefers a response as soon as the change is recorded to one when the hosts have
// carried it out. The caller sends the preference of RFC 7240 in the metadata: "prefer: respond-async". A call that does
// not wait for hosts need not read it. Other preferences are ignored, as the RFC requires.
func RespondAsync(ctx context.Context) bool {
	for _, list := range metadata.ValueFromIncomingContext(ctx, "prefer") {
		for preference := range strings.SplitSeq(list, ",") {
			name, _, _ := strings.Cut(preference, ";") // parameters
			if strings.EqualFold(strings.TrimSpace(name), "respond-async") {
				return true
			}
		}
	}
	return false
}
