package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"time"
)

// companion holds the parameters of the helper process that this program starts beside a member's process; see the
// package comment.
type companion struct {
	Parent    int      // PID of the member's process
	Ports     []string // addresses that the member serves clients on
	Scheme    string   // http or https
	Cert, Key string   // files, for https
	Forwards  []forward
}

// pollInterval is the interval at which the companion checks whether the member is ready and still runs.
const pollInterval = 20 * time.Millisecond

// run does the work of the helper process. It returns when the member's process ends. If no addresses are forwarded, it
// already returns when the member is ready.
func (c companion) run() error {
	ctx, cancel := context.WithCancel(context.Background())
	var work sync.WaitGroup
	defer work.Wait()
	defer cancel()
	for _, f := range c.Forwards {
		if f.Network == "unix" {
			os.Remove(f.From) // a socket left from an earlier run
		}
		listener, err := net.Listen(f.Network, f.From)
		if err != nil {
			return fmt.Errorf("listen on %s: %w", f.From, err)
		}
		work.Go(func() { forwardConns(ctx, listener, f.To) })
	}
	ready := false
	for os.Getppid() == c.Parent {
		if !ready && c.isReady(ctx) {
			ready = true
			c.logLine("ready to serve client requests")
			if len(c.Forwards) == 0 {
				return nil
			}
		}
		time.Sleep(pollInterval)
	}
	return nil
}

// isReady reports whether every client port serves /health, which includes a linearizable read. It uses HTTP/1.1,
// because test suites read the HTTP/2 traffic in the member's log and must find only their own requests.
func (c companion) isReady(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	for _, address := range c.Ports {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, c.Scheme+"://"+address+"/health", nil)
		if err != nil {
			return false
		}
		response, err := c.client().Do(request)
		if err != nil {
			return false
		}
		response.Body.Close()
		if response.StatusCode != http.StatusOK {
			return false
		}
	}
	return true
}

// client returns an HTTP client that presents the member's certificate on request and accepts any server certificate.
func (c companion) client() *http.Client {
	config := &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"http/1.1"}}
	if pair, err := tls.LoadX509KeyPair(c.Cert, c.Key); err == nil {
		config.Certificates = []tls.Certificate{pair}
	}
	return &http.Client{Transport: &http.Transport{TLSClientConfig: config, DisableKeepAlives: true}}
}

// logLine writes a line in etcd's log format to standard error.
func (c companion) logLine(message string) {
	line, err := json.Marshal(map[string]string{
		"level": "info", "ts": time.Now().UTC().Format("2006-01-02T15:04:05.000000Z0700"), "caller": "etcd/companion.go", "msg": message,
	})
	if err == nil {
		os.Stderr.Write(append(line, '\n'))
	}
}

// forwardConns accepts connections at the listener and forwards them to the TCP address in the parameter to, until ctx
// ends.
func forwardConns(ctx context.Context, listener net.Listener, to string) {
	stop := context.AfterFunc(ctx, func() { listener.Close() })
	defer stop()
	var work sync.WaitGroup
	defer work.Wait()
	for {
		in, err := listener.Accept()
		if err != nil {
			return
		}
		work.Go(func() {
			out, err := net.DialTimeout("tcp", to, time.Second)
			if err != nil {
				in.Close()
				return
			}
			end := context.AfterFunc(ctx, func() { in.Close(); out.Close() })
			defer end()
			defer in.Close()
			defer out.Close()
			var back sync.WaitGroup
			back.Go(func() { io.Copy(in, out); in.Close() })
			io.Copy(out, in)
			out.Close()
			back.Wait()
		})
	}
}
