// Package images holds the catalog of publishers' images, which is the file catalog.yaml in this directory.
package images

import _ "embed"

// Catalog is the content of the file catalog.yaml.
//
//go:embed catalog.yaml
var Catalog []byte
