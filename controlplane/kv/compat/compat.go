// Package compat holds Trivet's key-value store against etcd's own test suites and programs. It is a module of its own, so
// that nothing of etcd's server is ever linked into ours. README.md says what is run and what comes out.
package compat
