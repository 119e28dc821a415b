// Package openloop sends HTTP requests at a fixed rate, regardless of the responses. It measures each latency from the
// time when the request was due, not from when it was sent. So if the server stalls, the requests that become due
// meanwhile are measured as slow too (no coordinated omission).
//
// The package uses little CPU, because the server is on the same machine: requests are bytes that were built in
// advance, connections are reused, and each connection has one goroutine. It sends HTTP/1.1 and does not decode bodies.
//
// Each target has a fixed number of connections. A request that is due while all of them are busy waits for the next
// free one, and its latency includes that wait.
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

// answerWithin is the timeout for dialing a connection. It is also the timeout for one request and its complete
// response.
const answerWithin = 10 * time.Second

// Call is one HTTP request that Run sends.
type Call struct {
	// Kind is the name under which Result collects the latencies and failures of similar requests.
	Kind string
	// Target is the index in Options.Targets of the server that receives the request.
	Target int
	// Request is the complete HTTP/1.1 request, with head and body, as it is sent.
	Request []byte
	// Want is the only HTTP status that counts as success.
	Want int
}

// Options configures a run; all fields are required.
type Options struct {
	Targets []string // the host:port of each server
	// Conns is the number of connections to each target.
	Conns int
	// Rate is the number of requests per second to all targets together. Calls are sent in order: Calls[i] is due
	// i/Rate seconds after the start.
	Rate  float64
	Calls []Call
}

// Result holds the measurements of a run.
type Result struct {
	// Latencies holds the latencies of successful requests, by Call.Kind. A latency is the time from when the request
	// was due until the end of its response.
	Latencies map[string][]time.Duration
	// Failed counts, by Call.Kind, the requests with no response or with a status other than Call.Want. First is the
	// error of one of them.
	Failed map[string]int
	First  error
	// Late holds, for each request, how long after its due time it was sent, because the generator was late or all
	// connections were busy.
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

// Run sends all calls and returns when each has succeeded or failed. A failed call is part of the result. Run returns
// an error only if the options are invalid or ctx ends.
func Run(ctx context.Context, o Options) (Result, error) {
	if len(o.Targets) == 0 || o.Conns < 1 || o.Rate <= 0 {
		return Result{}, errors.New("an open loop needs targets, connections and a rate")
	}
	queues := make([]chan job, len(o.Targets))
	for i := range queues {
		queues[i] = make(chan job, len(o.Calls)) // has room for all calls, so send never blocks
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

// conn is a connection to one target. It is dialed before the first request, and again after it was closed.
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

// exchange sends a request and reads the response. It closes the connection after an error, or if the response says
// that the server will close it.
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
