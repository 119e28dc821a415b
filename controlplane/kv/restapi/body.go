package restapi

import (
	"context"
	"io"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// bodyTiers limits the memory of all request bodies to 128 MiB in total. Each body is divided into tiers by position:
// the bytes before the first upTo belong to the first tier, the bytes from there to the second upTo belong to the
// second tier, and so on. The bytes of all bodies in a tier take at most room bytes. Large bodies that arrive slowly,
// or never end, fill only the last tier, so small writes still succeed. To fill the first tier takes 4,096 connections
// that each have sent 4 KiB. To fill the second tier takes 546 connections that each have sent 64 KiB.
var bodyTiers = []struct{ upTo, room int64 }{
	{4 << 10, 16 << 20},
	{64 << 10, 32 << 20},
	{MaxBody, 80 << 20},
}

// bodyTimeout is the maximum time for which each read of a request body waits for memory.
const bodyTimeout = 2 * time.Second

// bodyBudget limits the memory of all request bodies. For each of bodyTiers it has one semaphore, which counts bytes.
type bodyBudget []*semaphore.Weighted

func newBodyBudget() bodyBudget {
	b := make(bodyBudget, len(bodyTiers))
	for i, t := range bodyTiers {
		b[i] = semaphore.NewWeighted(t.room)
	}
	return b
}

// countedBody is a request body whose bytes are counted against the budget as they arrive. So a client that announces a
// large body but sends nothing uses none of the budget.
type countedBody struct {
	io.ReadCloser
	ctx     context.Context
	budget  bodyBudget
	read    int64
	charged []int64 // bytes counted against each tier
}

// Read implements io.Reader. It fails with fault.Throttled if the bytes that it has read get no memory from the budget
// within bodyTimeout.
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

// body decodes the JSON body of a request into v, within the memory budget, and returns the body's bytes. If another
// member forwarded the request, the body must match the hash in forwardHeader. The caller must call free when it does
// not need the body any more, also after an error.
func (s *Server) body(r request, v any) (raw []byte, free func(), err error) {
	counted := &countedBody{ReadCloser: r.Body, ctx: r.Context(), budget: s.bodies, charged: make([]int64, len(bodyTiers))}
	r.Body = counted
	if raw, err = rest.Decode(r.Request, v); err != nil {
		return nil, counted.free, err
	}
	return raw, counted.free, r.forwarded.verifyBody(raw)
}
