package e2e

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/edge/openapi/openapitest"
	"github.com/trivet-cloud/trivet/docs/api"
	"github.com/trivet-cloud/trivet/e2e/lab"
)

// documented returns a function for lab.REST.Check that compares requests and responses with the OpenAPI documents in
// docs/api.
func documented(t *testing.T) func(port int, method, path string, body []byte, a *lab.Answer) error {
	checkers := map[int]*openapitest.Checker{}
	for port, name := range map[int]string{8081: "kv", 8083: "identity", 8084: "vm", 8086: "credit", 8087: "network"} {
		c, err := openapitest.New(api.Document(name))
		require.NoError(t, err, name)
		checkers[port] = c
	}
	return func(port int, method, path string, body []byte, a *lab.Answer) error {
		c := checkers[port]
		if c == nil {
			return nil
		}
		return c.Check(openapitest.Exchange{
			Method: method, URL: path, Body: body, Status: a.Status, ResponseHeader: a.Header, Response: []byte(a.Raw),
		})
	}
}
