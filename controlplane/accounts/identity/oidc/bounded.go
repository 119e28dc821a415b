package oidc

import (
	"io"
	"net/http"
)

// maxAnswer is the maximum size of a provider's response, in bytes.
const maxAnswer = 1 << 20

// bounded is a RoundTripper that truncates responses to maxAnswer bytes. A truncated response is invalid JSON, so its
// decoding fails.
type bounded struct{ next http.RoundTripper }

func (b bounded) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := b.next.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	resp.Body = struct {
		io.Reader
		io.Closer
	}{io.LimitReader(resp.Body, maxAnswer), resp.Body}
	return resp, nil
}
