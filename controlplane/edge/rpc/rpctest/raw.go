// Package rpctest contains a gRPC client for tests that sends HTTP/2 frames one by one. With it a test can stop in the
// middle of a message, or never read from the connection.
package rpctest

import (
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"net"
	"sync"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// Raw is a client connection to a gRPC server.
type Raw struct {
	conn   net.Conn
	next   uint32
	encode *hpack.Encoder
	block  bytes.Buffer
	done   chan struct{}

	write  sync.Mutex // guards writes to framer
	framer *http2.Framer

	mu      sync.Mutex
	changed *sync.Cond
	status  map[uint32]string
	message map[uint32]string
	window  map[uint32]int
	closed  bool
}

// Window is the initial flow-control window of a connection and of each call, in bytes.
const Window = 1<<16 - 1

// Dial connects to a server. A nil config means plaintext instead of TLS.
func Dial(address string, config *tls.Config) (*Raw, error) {
	conn, err := net.Dial("tcp", address)
	if err != nil {
		return nil, err
	}
	if config != nil {
		config = config.Clone()
		config.NextProtos = []string{"h2"}
		conn = tls.Client(conn, config)
	}
	r := &Raw{conn: conn, next: 1, framer: http2.NewFramer(conn, conn), done: make(chan struct{}),
		status: map[uint32]string{}, message: map[uint32]string{}, window: map[uint32]int{0: Window}}
	r.encode, r.changed = hpack.NewEncoder(&r.block), sync.NewCond(&r.mu)
	r.framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	if _, err := conn.Write([]byte(http2.ClientPreface)); err != nil {
		conn.Close()
		return nil, err
	}
	if err := r.framer.WriteSettings(); err != nil {
		conn.Close()
		return nil, err
	}
	go r.read()
	return r, nil
}

// Close closes the connection and waits until its reading goroutine has ended.
func (r *Raw) Close() error {
	err := r.conn.Close()
	<-r.done
	return err
}

func (r *Raw) read() {
	defer close(r.done)
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.closed = true
		r.changed.Broadcast()
	}()
	for {
		f, err := r.framer.ReadFrame()
		if err != nil {
			return
		}
		r.mu.Lock()
		switch f := f.(type) {
		case *http2.MetaHeadersFrame:
			for _, h := range f.Fields {
				switch h.Name {
				case "grpc-status":
					r.status[f.StreamID] = h.Value
				case "grpc-message":
					r.message[f.StreamID] = h.Value
				}
			}
		case *http2.RSTStreamFrame:
			if _, ok := r.status[f.StreamID]; !ok {
				r.status[f.StreamID] = "reset"
			}
		case *http2.WindowUpdateFrame:
			r.window[f.StreamID] += int(f.Increment)
		}
		r.changed.Broadcast()
		r.mu.Unlock()
		if f, ok := f.(*http2.PingFrame); ok && !f.IsAck() {
			r.write.Lock()
			r.framer.WritePing(true, f.Data)
			r.write.Unlock()
		}
	}
}

// Call starts a call by sending its headers, and returns its stream ID. headers holds additional headers as pairs of
// name and value.
func (r *Raw) Call(method string, headers ...string) (stream uint32, err error) {
	r.write.Lock()
	defer r.write.Unlock()
	r.block.Reset()
	pairs := append([]string{":method", "POST", ":scheme", "http", ":path", method, ":authority", "x",
		"content-type", "application/grpc", "te", "trailers"}, headers...)
	for i := 0; i < len(pairs); i += 2 {
		if err := r.encode.WriteField(hpack.HeaderField{Name: pairs[i], Value: pairs[i+1]}); err != nil {
			return 0, err
		}
	}
	stream = r.next
	r.next += 2
	r.mu.Lock()
	r.window[stream] = Window
	r.mu.Unlock()
	return stream, r.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: r.block.Bytes(), EndHeaders: true})
}

// Message returns body as a gRPC message: with the prefix of five bytes that contains its length.
func Message(body []byte) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(body))), body...)
}

// Data sends one DATA frame of a call, regardless of the flow-control windows. end marks the call's last frame; pad is
// the frame's padding.
func (r *Raw) Data(stream uint32, end bool, data []byte, pad []byte) error {
	r.write.Lock()
	defer r.write.Unlock()
	return r.framer.WriteDataPadded(stream, end, data, pad)
}

// Stall announces a message of length bytes and sends all of it but the last byte, as far as the flow-control windows
// allow. It returns the number of bytes sent, including the prefix. It stops early if no window opens within the time
// patience, or if the call has ended.
func (r *Raw) Stall(stream uint32, length int, patience time.Duration) (sent int, err error) {
	rest := length + 5 - 1
	piece := make([]byte, 16<<10)
	binary.BigEndian.PutUint32(piece[1:], uint32(length))
	for rest > 0 {
		n := r.take(stream, min(rest, len(piece)), patience)
		if n == 0 {
			return sent, nil
		}
		if err := r.Data(stream, false, piece[:n], nil); err != nil {
			return sent, err
		}
		if sent == 0 {
			piece = make([]byte, 16<<10)
		}
		sent, rest = sent+n, rest-n
	}
	return sent, nil
}

// take reserves up to n bytes of the flow-control windows of the connection and of the stream, and returns how many it
// reserved. It returns 0 if no window opens within the time patience, or if the call has ended.
func (r *Raw) take(stream uint32, n int, patience time.Duration) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.await(patience, func() bool { return r.status[stream] != "" || min(r.window[0], r.window[stream]) > 0 }) || r.status[stream] != "" {
		return 0
	}
	n = min(n, r.window[0], r.window[stream])
	r.window[0] -= n
	r.window[stream] -= n
	return n
}

// await waits until the condition holds, until the time patience has passed, or until the connection is closed. The
// parameter is returns whether the condition holds, and await returns its last result. The caller must have locked
// r.mu.
func (r *Raw) await(patience time.Duration, is func() bool) bool {
	late := false
	defer time.AfterFunc(patience, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		late = true
		r.changed.Broadcast()
	}).Stop()
	for !is() && !late && !r.closed {
		r.changed.Wait()
	}
	return is()
}

// Status waits up to the time patience until a call has ended. It returns the call's status code, as a number, and its
// message. The code is "reset" if the stream was reset without a status.
func (r *Raw) Status(stream uint32, patience time.Duration) (code, message string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.await(patience, func() bool { return r.status[stream] != "" }) {
		return "", "", fmt.Errorf("call %d has not ended", stream)
	}
	return r.status[stream], r.message[stream], nil
}
