package main

import (
	"bytes"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/edge/openapi"
	"github.com/trivet-cloud/trivet/controlplane/edge/openapi/openapitest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/shared/protodoc"
)

// documents lists the OpenAPI documents: the name of the listener, its standard port, and what the API is for.
var documents = []struct {
	name  string
	port  int
	title string
}{
	{"kv", 8081, "Trivet: keys and members"},
	{"identity", 8083, "Trivet: identity"},
	{"vm", 8084, "Trivet: VMs, images, volumes, consoles and hosts"},
	{"credit", 8086, "Trivet: credit"},
	{"network", 8087, "Trivet: networks"},
}

const documentText = "Errors, credentials, repeats, lists and streams are described in docs/api.md. HEAD works wherever GET does."

// TestOpenAPI generates the OpenAPI document of each REST API from the routes of a running member and the comments of
// the protos. The documents must be valid, the same as the files in docs/api, and the same as what the member serves.
func TestOpenAPI(t *testing.T) {
	comments, err := protodoc.Load("../protos")
	require.NoError(t, err)
	h := startMember(t)
	for _, d := range documents {
		l := h.listenerNamed(d.name)
		text, err := json.MarshalIndent(openapi.Document(restRoutes(l), openapi.Options{
			Title: d.title, Description: documentText, Port: d.port, Comment: comments.Comment,
			GoComment: openapitest.GoComments("github.com/trivet-cloud/trivet", ".."),
		}), "", " ")
		require.NoError(t, err)
		text = append(text, '\n')
		_, err = openapitest.New(text)
		require.NoError(t, err, d.name)
		requireDescriptions(t, text)
		file := filepath.Join("..", "docs", "api", d.name+".json")
		if *rewrite {
			require.NoError(t, os.WriteFile(file, text, 0o644))
			continue
		}
		want, err := os.ReadFile(file)
		require.NoError(t, err)
		require.True(t, bytes.Equal(want, text), "%s is not up to date: run go test ./controlplane -run TestOpenAPI -rewrite", file)
		got, served := h.send(call{endpoint: endpoint{listener: l, method: http.MethodGet}, path: "/openapi.json"})
		require.Equal(t, http.StatusOK, got.StatusCode)
		require.Equal(t, "application/json", got.Header.Get("Content-Type"))
		require.True(t, bytes.Equal(text, served), "%s serves another document", d.name)
	}
}

// requireDescriptions checks that each field of the bodies that are Go structs has a description. The fields of messages
// have the comments of the protos.
func requireDescriptions(t *testing.T, document []byte) {
	type schema struct {
		Description string
		Properties  map[string]json.RawMessage
	}
	var d struct {
		Components struct{ Schemas map[string]schema }
	}
	require.NoError(t, json.Unmarshal(document, &d))
	var check func(at string, s schema)
	check = func(at string, s schema) {
		for name, text := range s.Properties {
			var field schema
			require.NoError(t, json.Unmarshal(text, &field))
			require.NotEmpty(t, field.Description, "%s.%s: the field of the Go struct needs a comment", at, name)
			check(at+"."+name, field)
		}
	}
	for name, s := range d.Components.Schemas {
		if name != "Error" && !isMessage(name) {
			check(name, s)
		}
	}
}

// isMessage reports whether the name of a schema is that of a message, such as network.v1.Port.
func isMessage(name string) bool { return strings.Contains(name, ".v1.") }

// isScrape reports whether a path is for Prometheus, and not a part of a REST API.
func isScrape(path string) bool { return path == "/metrics" || path == "/targets" }

// restRoutes returns the routes of a REST API, without those for Prometheus.
func restRoutes(l boundListener) (out []rest.Route) {
	for _, r := range l.http.(interface{ Routes() []rest.Route }).Routes() {
		if !isScrape(r.Path) {
			out = append(out, r)
		}
	}
	return out
}

func (h *testMember) listenerNamed(name string) boundListener {
	for _, l := range h.listeners {
		if l.name == name {
			return l
		}
	}
	require.Fail(h.t, "no listener "+name)
	return boundListener{}
}

// checkerOf returns the checker of a listener's exchanges, or nil for one without an OpenAPI document.
func (h *testMember) checkerOf(l boundListener) *openapitest.Checker {
	routes, ok := l.http.(interface{ Routes() []rest.Route })
	if !ok || routes == nil {
		return nil
	}
	if h.checkers == nil {
		h.checkers = map[string]*openapitest.Checker{}
	}
	if h.checkers[l.name] == nil {
		c, err := openapitest.ForRoutes(restRoutes(l))
		require.NoError(h.t, err)
		h.checkers[l.name] = c
	}
	return h.checkers[l.name]
}
