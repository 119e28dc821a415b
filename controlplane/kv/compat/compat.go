// Package compat tests Trivet's key-value store with etcd's own test suites and programs. It is a separate module, so
// that etcd's server is never linked into Trivet. README.md lists what is run and the results.
package compat
