// Package api contains the OpenAPI documents of the REST APIs, which members serve at /openapi.json. The test
// TestOpenAPI of package controlplane writes them.
package api

import "embed"

//go:embed *.json
var files embed.FS

// Document returns the OpenAPI document of the REST API with the given name: vm, identity, credit, network or kv. It
// returns nil for another name.
func Document(name string) []byte {
	text, err := files.ReadFile(name + ".json")
	if err != nil {
		return nil
	}
	return text
}
