package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/trivet-cloud/trivet/nodeagent/rbd/rbdtest"
)

// fixture runs package rbdtest, which is written for tests, in a program. It implements the methods of testing.TB that
// rbdtest calls.
type fixture struct {
	testing.TB // nil
	ctx        context.Context
	cleanups   []func()
	failure    error
}

func (f *fixture) Helper()                  {}
func (f *fixture) Context() context.Context { return f.ctx }
func (f *fixture) Cleanup(do func())        { f.cleanups = append(f.cleanups, do) }
func (f *fixture) Failed() bool             { return f.failure != nil }
func (f *fixture) FailNow()                 { panic(f) }
func (f *fixture) Logf(string, ...any)      {}

func (f *fixture) Errorf(format string, args ...any) {
	f.failure = errors.Join(f.failure, fmt.Errorf(format, args...))
}

func (f *fixture) Skipf(format string, args ...any) {
	f.Errorf(format, args...)
	f.FailNow()
}

// run calls do and returns the failure that ended it.
func (f *fixture) run(do func()) (err error) {
	defer func() {
		if r := recover(); r != nil {
			if r != any(f) {
				panic(r)
			}
			err = f.failure
		}
	}()
	do()
	return f.failure
}

// close runs the cleanups in reverse order, which stop the Ceph cluster.
func (f *fixture) close() error {
	f.ctx = context.WithoutCancel(f.ctx)
	for _, do := range slices.Backward(f.cleanups) {
		_ = f.run(do) // the failure stays in f
	}
	return f.failure
}

// startCeph starts a Ceph cluster, which ends with the close of the fixture.
func startCeph(ctx context.Context) (c *rbdtest.Ceph, f *fixture, err error) {
	f = &fixture{ctx: ctx}
	err = f.run(func() { c = rbdtest.Start(f) })
	return c, f, err
}
