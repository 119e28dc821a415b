// Package openloop sends HTTP requests at a fixed rate, regardless of the responses, and measures each latency from
// when the request was due: if the server stalls, the requests that were due meanwhile count too (no coordinated
// omission).
//
// It is made to use little CPU beside a server on the same machine: requests are bytes that were built in advance,
// connections are kept open, and one goroutine serves one connection. It knows HTTP/1.1 and does not interpret
// contents.
//
// Each target has a bounded number of connections. A request that is due while all of them are busy is sent by the next
// free one, and its latency includes the wait.
package openloop

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"time"
)

// answerWithin is the timeout for dialing, and for a request and its response including the body.
const answerWithin = 10 * time.Second

// Call is one request.
type Call struct {
	// Kind groups latencies.
	Kind string
	// Target is an index into Options.Targets.
	Target int
	// Request is the complete request in wire format.
	Request []byte
	// Want is the status of a successful response.
	Want int
}

// Options configures a run; all fields are required.
type Options struct {
	Targets []string // host:port
	// Conns is the number of connections per target.
	Conns int
	// Rate is in requests per second; Calls are sent in order, Calls[i] at i/Rate after the start.
	Rate  float64
	Calls []Call
}

// Result holds the measurements of a run.
type Result struct {
	// Latencies holds the latencies of the successes by kind, from when each request was due.
	Latencies map[string][]time.Duration
	// Failed counts, by kind, the requests with another status or no response. First is the error of one of them.
	Failed map[string]int
	First  error
	// Late holds how long after its due time each request was sent: the delay by the generator and by busy connections.
	Late []time.Duration
}

func newResult() Result {
	return Result{Latencies: map[string][]time.Duration{}, Failed: map[string]int{}}
}

func (r *Result) add(o Result) {
	for kind, l := range o.Latencies {
		r.Latencies[kind] = append(r.Latencies[kind], l...)
	}
	for kind, n := range o.Failed {
		r.Failed[kind] += n
	}
	if r.First == nil {
		r.First = o.First
	}
	r.Late = append(r.Late, o.Late...)
}

// Add adds the measurements of another run to r.
func (r *Result) Add(o Result) {
	if r.Latencies == nil {
		*r = newResult()
	}
	r.add(o)
}

type job struct {
	call *Call
	due  time.Time
}

// Run sends all calls and returns when each has succeeded or failed. The error is that of the options or of ctx.
func Run(ctx context.Context, o Options) (Result, error) {
	if len(o.Targets) == 0 || o.Conns < 1 || o.Rate <= 0 {
		return Result{}, errors.New("an open loop needs targets, connections and a rate")
	}
	queues := make([]chan job, len(o.Targets))
	for i := range queues {
		queues[i] = make(chan job, len(o.Calls)) // so that sending never blocks
	}
	results := make([]Result, len(o.Targets)*o.Conns)
	var workers sync.WaitGroup
	for i := range results {
		results[i] = newResult()
		workers.Go(func() {
			c := conn{addr: o.Targets[i%len(o.Targets)]}
			defer c.close()
			for j := range queues[i%len(o.Targets)] {
				c.serve(j, &results[i])
			}
		})
	}
	err := send(ctx, o, queues)
	for _, q := range queues {
		close(q)
	}
	workers.Wait()
	all := newResult()
	for _, r := range results {
		all.add(r)
	}
	return all, err
}

func send(ctx context.Context, o Options, queues []chan job) error {
	start := time.Now()
	for i := range o.Calls {
		due := start.Add(time.Duration(float64(i) / o.Rate * float64(time.Second)))
		if wait := time.Until(due); wait > 0 {
			time.Sleep(wait)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		c := &o.Calls[i]
		if c.Target < 0 || c.Target >= len(queues) {
			return fmt.Errorf("call %d: no target %d", i, c.Target)
		}
		queues[c.Target] <- job{c, due}
	}
	return nil
}

// conn is a connection that is dialed when needed.
type conn struct {
	addr string
	c    net.Conn
	r    *bufio.Reader
}

func (c *conn) close() {
	if c.c != nil {
		c.c.Close()
		c.c = nil
	}
}

func (c *conn) serve(j job, out *Result) {
	out.Late = append(out.Late, time.Since(j.due))
	err := c.do(j.call)
	if err != nil {
		out.Failed[j.call.Kind]++
		if out.First == nil {
			out.First = fmt.Errorf("%s: %w", j.call.Kind, err)
		}
		return
	}
	out.Latencies[j.call.Kind] = append(out.Latencies[j.call.Kind], time.Since(j.due))
}

func (c *conn) do(call *Call) error {
	if c.c == nil {
		dialled, err := net.DialTimeout("tcp", c.addr, answerWithin)
		if err != nil {
			return err
		}
		c.c, c.r = dialled, bufio.NewReaderSize(dialled, 32<<10)
	}
	if err := c.exchange(call); err != nil {
		return err
	}
	return nil
}

// exchange sends a request and reads the response. It closes the connection unless it can be reused.
func (c *conn) exchange(call *Call) (err error) {
	again := false
	defer func() {
		if !again {
			c.close()
		}
	}()
	if err := c.c.SetDeadline(time.Now().Add(answerWithin)); err != nil {
		return err
	}
	if _, err := c.c.Write(call.Request); err != nil {
		return err
	}
	resp, err := http.ReadResponse(c.r, nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != call.Want {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 512))
		return fmt.Errorf("%s, want %d: %s", resp.Status, call.Want, bytes.TrimSpace(text))
	}
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		return err
	}
	again = !resp.Close
	return nil
}
