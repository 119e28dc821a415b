package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/metrics"
)

// minScrapeToken is the minimum length of the token in the file that metrics_token names, in bytes.
const minScrapeToken = 16

// validateMetrics checks the settings of /metrics.
func (c *Config) validateMetrics() error {
	for _, name := range c.MetricsHosts {
		if !validName.MatchString(strings.ToLower(name)) {
			return fmt.Errorf("metrics_hosts: %q is not a host name", name)
		}
	}
	for _, f := range []struct{ key, path string }{
		{"metrics_cert", c.MetricsCert}, {"metrics_key", c.MetricsKey}, {"metrics_token", c.MetricsToken},
	} {
		if f.path != "" && !filepath.IsAbs(f.path) {
			return fmt.Errorf("%s: %q is not an absolute path", f.key, f.path)
		}
	}
	if (c.MetricsCert == "") != (c.MetricsKey == "") {
		return errors.New("metrics_cert, metrics_key: set both or neither")
	}
	if c.MetricsListen == "" {
		return nil
	}
	host, _, err := net.SplitHostPort(c.MetricsListen)
	if err != nil {
		return fmt.Errorf("metrics_listen: %w", err)
	}
	ip, err := netip.ParseAddr(host)
	if loopback := host == "localhost" || err == nil && ip.IsLoopback(); c.MetricsToken != "" && c.MetricsCert == "" && !loopback {
		return errors.New("metrics_token: set metrics_cert and metrics_key too, because the token would be sent without encryption")
	}
	return nil
}

// scrapeToken returns the function that reads the token which requests for /metrics must have, or nil if they need
// none. The file is read for each request, so that a changed token is used at once.
func (c *Config) scrapeToken() func() (string, error) {
	if c.MetricsToken == "" {
		return nil
	}
	return func() (string, error) {
		text, err := os.ReadFile(c.MetricsToken)
		if err != nil {
			return "", fmt.Errorf("read metrics_token: %w", err)
		}
		token := strings.TrimSpace(string(text))
		if len(token) < minScrapeToken {
			return "", fmt.Errorf("read metrics_token: the token in %s has fewer than %d bytes", c.MetricsToken, minScrapeToken)
		}
		return token, nil
	}
}

// metricsTLS returns the TLS configuration of metrics_listen, or nil for plaintext. It returns an error if the
// certificate cannot be read. The files are read again for each connection, so that a renewed certificate is used
// without a restart.
func (c *Config) metricsTLS() (*tls.Config, error) {
	if c.MetricsCert == "" {
		return nil, nil
	}
	load := func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		pair, err := tls.LoadX509KeyPair(c.MetricsCert, c.MetricsKey)
		if err != nil {
			return nil, fmt.Errorf("read metrics_cert and metrics_key: %w", err)
		}
		return &pair, nil
	}
	if _, err := load(nil); err != nil {
		return nil, err
	}
	return &tls.Config{GetCertificate: load, MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}}, nil
}

// metricsRetry is the time after which the agent tries again to serve metrics.
const metricsRetry = 30 * time.Second

// serveMetrics serves /metrics and /health on metrics_listen until ctx ends. An agent that cannot serve them, for example
// because the certificate cannot be read, logs the reason and tries again: an agent that stops lets the host's lease
// end, and the VMs with it.
func (a *agent) serveMetrics(ctx context.Context) {
	for {
		err := a.tryMetrics(ctx)
		if ctx.Err() != nil {
			return
		}
		a.log.Error("metrics are not served; the agent tries again", "in", metricsRetry, "err", err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(metricsRetry):
		}
	}
}

// tryMetrics serves metrics until ctx ends. It returns an error if it cannot.
func (a *agent) tryMetrics(ctx context.Context) error {
	secure, err := a.config.metricsTLS()
	if err != nil {
		return fmt.Errorf("serve metrics: %w", err)
	}
	token := a.config.scrapeToken()
	if token != nil {
		if _, err := token(); err != nil {
			return fmt.Errorf("serve metrics: %w", err)
		}
	}
	listener, err := net.Listen("tcp", a.config.MetricsListen)
	if err != nil {
		return fmt.Errorf("serve metrics: %w", err)
	}
	handler := metrics.Handler(a.sources(), metrics.Access{Hosts: a.config.metricsHosts(), Token: token}, a.log)
	return serve(ctx, listener, secure, handler)
}

// serve serves HTTP on listener until ctx ends. It uses TLS unless secure is nil.
func serve(ctx context.Context, listener net.Listener, secure *tls.Config, h http.Handler) error {
	if secure != nil {
		listener = tls.NewListener(listener, secure)
	}
	server := &http.Server{
		Handler: h, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, WriteTimeout: 30 * time.Second,
		IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10,
	}
	stop := context.AfterFunc(ctx, func() { server.Close() })
	defer stop()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve metrics: %w", err)
	}
	return nil
}
