//go:build pins

// This file is never built. It imports the packages that `go test go.etcd.io/etcd/tests/v3/common` needs, so that
// go.sum contains their checksums.
package compat

import (
	_ "go.etcd.io/etcd/tests/v3/framework"
	_ "go.etcd.io/etcd/tests/v3/robustness/client"
	_ "go.etcd.io/etcd/tests/v3/robustness/model"
	_ "go.etcd.io/etcd/tests/v3/robustness/traffic"
	_ "go.etcd.io/etcd/tests/v3/robustness/validate"
)
