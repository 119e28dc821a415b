package openapitest

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
)

type thing struct {
	Name  string   `json:"name"`
	Count uint32   `json:"count"`
	Note  *string  `json:"note"`
	Tags  []string `json:"tags,omitempty"`
}

type thingBody struct {
	Name *string `json:"name" api:"required"`
	Size uint64  `json:"size"`
}

// TestCheck compares exchanges with the document of two routes. The first ones are allowed, and the others are each wrong
// in one way.
func TestCheck(t *testing.T) {
	c, err := ForRoutes([]rest.Route{
		{Method: "GET", Path: "/things/{id}", Open: "a test", Summary: "Returns a thing.", Query: []rest.Parameter{{Name: "depth", Type: uint32(0)}}, Status: 200, Data: thing{}},
		{Method: "POST", Path: "/things", Open: "a test", Summary: "Creates a thing.", Body: thingBody{}, Status: 201, Data: thing{}},
	})
	require.NoError(t, err)
	const meta = `,"meta":{"request_id":"6f1c6a52-0d0e-4f6b-9c39-3c1d3b6f2a11","timestamp":"2026-01-02T03:04:05.6Z"}}`
	for _, x := range []struct {
		method, url, body string
		status            int
		answer            string
		wrong             string
	}{
		{"GET", "/things/a", "", 200, `{"data":{"name":"a","count":1,"note":null}` + meta, ""},
		{"GET", "/things/a?depth=2", "", 200, `{"data":{"name":"a","count":1,"note":"n","tags":["t"]}` + meta, ""},
		{"GET", "/things/a", "", 404, `{"error":{"code":"NOT_FOUND","message":"no thing","details":{"reason":"X"}}` + meta, ""},
		{"POST", "/things", `{"name":"a"}`, 201, `{"data":{"name":"a","count":1,"note":null}` + meta, ""},
		{"POST", "/things", `{"nmae":"a"}`, 400, `{"error":{"code":"INVALID_ARGUMENT","message":"m"}` + meta, ""},
		{"GET", "/other", "", 404, `{"error":{"code":"NOT_FOUND","message":"no path"}` + meta, ""},
		{"HEAD", "/things/a", "", 200, "", ""},

		{"GET", "/other", "", 200, `{"data":{}` + meta, "not in the document"},
		{"GET", "/things/a", "", 201, `{"data":{"name":"a","count":1,"note":null}` + meta, "response 201"},
		{"GET", "/things/a", "", 200, `{"data":{"name":"a","count":1}` + meta, "note"},
		{"GET", "/things/a", "", 200, `{"data":{"name":"a","count":"1","note":null}` + meta, "count"},
		{"GET", "/things/a", "", 200, `{"data":{"name":"a","count":1,"note":null,"more":1}` + meta, "more"},
		{"GET", "/things/a", "", 200, `{"data":{"name":"a","count":1,"note":null}}`, "meta"},
		{"GET", "/things/a", "", 500, `{"error":{"message":"m"}` + meta, "code"},
		{"GET", "/things/a?width=2", "", 200, `{"data":{"name":"a","count":1,"note":null}` + meta, "width"},
		{"GET", "/things/a?depth=x", "", 200, `{"data":{"name":"a","count":1,"note":null}` + meta, "depth"},
		{"POST", "/things", `{"name":"a","sise":1}`, 201, `{"data":{"name":"a","count":1,"note":null}` + meta, "sise"},
		{"POST", "/things", `{"size":1}`, 201, `{"data":{"name":"a","count":1,"note":null}` + meta, "name"},
		{"POST", "/things", `{"name":"a","size":-1}`, 201, `{"data":{"name":"a","count":1,"note":null}` + meta, "size"},
	} {
		err := c.Check(Exchange{
			Method: x.method, URL: x.url, Body: []byte(x.body), Status: x.status,
			ResponseHeader: http.Header{"Content-Type": {"application/json"}}, Response: []byte(x.answer),
		})
		if x.wrong == "" {
			require.NoError(t, err, "%v", x)
		} else {
			require.ErrorContains(t, err, x.wrong, "%v", x)
		}
	}
}

// TestFind checks which path of the document a request belongs to.
func TestFind(t *testing.T) {
	var routes []rest.Route
	for _, r := range []string{"GET /kv/{key:.*}", "POST /kv/{key:.*}/put", "GET /images/{id}", "GET /images/all", "POST /images/uploads"} {
		method, path, _ := strings.Cut(r, " ")
		routes = append(routes, rest.Route{Method: method, Path: path, Open: "a test", Summary: "Test.", Status: 200, Data: thing{}})
	}
	c, err := ForRoutes(routes)
	require.NoError(t, err)
	for in, want := range map[string]string{
		"GET /kv/a/b": "/kv/{key}", "POST /kv/a/b/put": "/kv/{key}/put", "GET /images/7": "/images/{id}", "GET /images/all": "/images/all",
		"POST /images/uploads": "/images/uploads", "GET /none": "",
	} {
		method, path, _ := strings.Cut(in, " ")
		got, _ := c.find(method, path)
		require.Equal(t, want, got, in)
	}
}
