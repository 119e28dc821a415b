// Package mutanttest runs the body of a test twice: as a normal test, and with a mutant of package mutant active, where
// the same body must fail.
//
// Such a body, a story, is a function of a testing.TB. The normal test calls the story with its *testing.T. With the
// build tag mutant, Noticed calls the story without the mutant, where it must pass, and with it, where it must fail. So
// a rule that no longer has a test that notices its loss makes Noticed fail.
package mutanttest

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"testing"
)

// Run runs f as the subtest name if t is a *testing.T. In a story that runs with a mutant, Run calls f directly; a
// failure of f then ends the story.
func Run(t testing.TB, name string, f func(t testing.TB)) {
	t.Helper()
	if test, ok := t.(*testing.T); ok {
		test.Run(name, func(t *testing.T) { f(t) })
		return
	}
	if r, ok := t.(*recorder); ok {
		defer r.enter(name)()
	}
	f(t)
}

// Fails runs a story to its end, including its cleanups, and reports whether it failed, with the texts of its failures.
// The failures do not fail t. If the story skips itself, t is skipped.
func Fails(t testing.TB, story func(t testing.TB)) (failed bool, texts []string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r := &recorder{TB: t, ctx: ctx}
	r.call(func() { story(r) })
	cancel()
	for {
		cleanup := r.takeCleanup()
		if cleanup == nil {
			break
		}
		r.call(cleanup)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.skipped && !r.failed {
		t.Skip(fmt.Sprint("the story was skipped: ", r.texts))
	}
	return r.failed, r.texts
}

// recorder is the testing.TB of a story. It records failures instead of passing them on.
type recorder struct {
	testing.TB
	ctx context.Context

	mu       sync.Mutex
	failed   bool
	skipped  bool
	part     string // name of the part that Run runs, or ""
	texts    []string
	cleanups []func()
}

// call runs f in a goroutine of its own, because FailNow ends the goroutine.
func (r *recorder) call(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	<-done
}

func (r *recorder) takeCleanup() func() {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := len(r.cleanups)
	if n == 0 {
		return nil
	}
	last := r.cleanups[n-1]
	r.cleanups = slices.Delete(r.cleanups, n-1, n)
	return last
}

func (r *recorder) record(failed, skipped bool, text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failed, r.skipped = r.failed || failed, r.skipped || skipped
	if text != "" && r.part != "" {
		text = r.part + ": " + text
	}
	if text != "" {
		r.texts = append(r.texts, text)
	}
}

// enter makes failures carry the name of a part, until the returned function is called.
func (r *recorder) enter(part string) (leave func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	before := r.part
	r.part = part
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.part = before
	}
}

// Cleanup implements testing.TB. The function runs when the story ends.
func (r *recorder) Cleanup(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cleanups = append(r.cleanups, f)
}

// Context implements testing.TB. The context ends before the story's cleanups run.
func (r *recorder) Context() context.Context { return r.ctx }

// Failed implements testing.TB.
func (r *recorder) Failed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.failed
}

// Fail implements testing.TB.
func (r *recorder) Fail() { r.record(true, false, "") }

// FailNow implements testing.TB.
func (r *recorder) FailNow() {
	r.Fail()
	runtime.Goexit()
}

// Error implements testing.TB.
func (r *recorder) Error(args ...any) { r.record(true, false, fmt.Sprint(args...)) }

// Errorf implements testing.TB.
func (r *recorder) Errorf(format string, args ...any) {
	r.record(true, false, fmt.Sprintf(format, args...))
}

// Fatal implements testing.TB.
func (r *recorder) Fatal(args ...any) {
	r.Error(args...)
	runtime.Goexit()
}

// Fatalf implements testing.TB.
func (r *recorder) Fatalf(format string, args ...any) {
	r.Errorf(format, args...)
	runtime.Goexit()
}

// Skip implements testing.TB.
func (r *recorder) Skip(args ...any) {
	r.record(false, true, fmt.Sprint(args...))
	runtime.Goexit()
}

// Skipf implements testing.TB.
func (r *recorder) Skipf(format string, args ...any) { r.Skip(fmt.Sprintf(format, args...)) }

// SkipNow implements testing.TB.
func (r *recorder) SkipNow() { r.Skip() }

// Skipped implements testing.TB.
func (r *recorder) Skipped() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.skipped
}
