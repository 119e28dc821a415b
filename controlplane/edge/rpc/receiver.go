package rpc

import "context"

// receipt is the result of one call of a stream's Recv.
type receipt[M any] struct {
	message M
	err     error
}

// Receiver adapts a blocking recv of a stream into a function that takes a context. One goroutine at a time may call the
// returned function. If its context ends first, it returns the error of the context, and the next call returns the
// message. The parameter ctx is the context of the stream.
//
// At most one message is received ahead. A goroutine calls recv until recv returns an error or ctx ends. On the server's
// side of a stream, recv can block until the handler has returned, so the handler cannot wait for this goroutine.
func Receiver[M any](ctx context.Context, recv func() (M, error)) func(context.Context) (M, error) {
	messages := make(chan receipt[M])
	go func() {
		for {
			message, err := recv()
			select {
			case messages <- receipt[M]{message, err}:
			case <-ctx.Done():
				return
			}
			if err != nil {
				return
			}
		}
	}()
	var last error
	return func(wait context.Context) (none M, err error) {
		if last != nil {
			return none, last
		}
		select {
		case m := <-messages:
			last = m.err
			return m.message, m.err
		case <-wait.Done():
			return none, wait.Err()
		case <-ctx.Done():
			return none, ctx.Err()
		}
	}
}
