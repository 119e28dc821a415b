package restapi

import (
	"context"
	"io"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// bodyTiers bounds the memory of all request bodies, 128 MiB in total. Each tier has its own memory, of room bytes. The
// first tier contains the bytes of each body up to the first upTo, the second tier the bytes from there up to the
// second upTo, and so on. Large bodies that arrive slowly, or never end, fill only the last tier, so small writes still
// succeed. To fill the first tier takes 4,096 connections that each have sent 4 KiB. To fill the second tier takes 546
// connections that each have sent 64 KiB.
var bodyTiers = []struct{ upTo, room int64 }{
	{4 << 10, 16 << 20},
	{64 << 10, 32 << 20},
	{MaxBody, 80 << 20},
}

// bodyTimeout is how long a request waits for memory for its body.
const bodyTimeout = 2 * time.Second

// bodyBudget limits the memory of all request bodies, with one semaphore, in bytes, for each of bodyTiers.
type bodyBudget []*semaphore.Weighted

func newBodyBudget() bodyBudget {
	b := make(bodyBudget, len(bodyTiers))
	for i, t := range bodyTiers {
		b[i] = semaphore.NewWeighted(t.room)
	}
	return b
}

// countedBody is a request body whose bytes count against the budget when they arrive, so that a client that announces
// a large body but sends nothing uses no memory of the budget.
type countedBody struct {
	io.ReadCloser
	ctx     context.Context
	budget  bodyBudget
	read    int64
	charged []int64 // bytes counted against each tier
}

// Read implements io.Reader. It fails with fault.Throttled if there is no memory for the bytes that it has read within
// bodyTimeout.
func (c *countedBody) Read(p []byte) (int, error) {
	tier := 0
	for tier < len(bodyTiers)-1 && c.read >= bodyTiers[tier].upTo {
		tier++
	}
	if left := bodyTiers[tier].upTo - c.read; tier < len(bodyTiers)-1 && int64(len(p)) > left {
		p = p[:left]
	}
	n, err := c.ReadCloser.Read(p)
	if n <= 0 {
		return n, err
	}
	ctx, cancel := context.WithTimeout(c.ctx, bodyTimeout)
	defer cancel()
	if c.budget[tier].Acquire(ctx, int64(n)) != nil {
		return 0, fault.New(fault.Throttled, "too many large request bodies are being received at once: try again, or send smaller values").MayRetry()
	}
	c.charged[tier] += int64(n)
	c.read += int64(n)
	return n, err
}

// free returns the memory of the body to the budget.
func (c *countedBody) free() {
	for tier, n := range c.charged {
		c.budget[tier].Release(n)
	}
}

// body decodes a JSON body into v, within the memory budget, and returns its bytes. The body of a forwarded request
// must match the hash in its header. The caller must call free, also after an error, when it does not need the body any
// more.
func (s *Server) body(r request, v any) (raw []byte, free func(), err error) {
	counted := &countedBody{ReadCloser: r.Body, ctx: r.Context(), budget: s.bodies, charged: make([]int64, len(bodyTiers))}
	r.Body = counted
	if raw, err = rest.Decode(r.Request, v); err != nil {
		return nil, counted.free, err
	}
	return raw, counted.free, r.forwarded.verifyBody(raw)
}
