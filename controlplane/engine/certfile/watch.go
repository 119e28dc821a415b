package certfile

import (
	"context"
	"crypto/sha256"
	"os"
	"time"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

const (
	// Every is the interval at which Run reads the certificate and the key file.
	Every = 5 * time.Second
	// warnBefore is the time before the certificate's expiry from which on a warning is logged. Certificates of 90 days
	// are usually renewed 30 days before their expiry, so a renewal has failed by then. For a certificate that is valid
	// for a shorter time, the warning starts in the last fifth of that time.
	warnBefore = 14 * 24 * time.Hour
	// warnEvery is the interval between two warnings about expiry.
	warnEvery = 12 * time.Hour
)

// Run reads the files every Every, and at once for each signal on hurry, until ctx ends. It uses a new valid pair and
// logs an invalid one.
func (p *Pair) Run(ctx context.Context, hurry <-chan os.Signal) {
	tick := time.NewTicker(Every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-hurry:
			p.seen = [sha256.Size]byte{} // so that the result is logged even if the files are unchanged
			p.look()
		case <-tick.C:
			p.look()
		}
	}
}

// look reads the files. If they have changed, it uses the new pair if that is valid, and otherwise logs the error and
// does not replace the previous pair.
func (p *Pair) look() {
	defer p.warn()
	cert, key, err := p.read()
	now := sum(cert, key, err)
	if now == p.seen {
		return
	}
	p.seen = now
	if err == nil {
		err = p.take(cert, key)
	}
	if err != nil {
		p.opts.Log.Warn("the new certificate is not used; the previous one stays in use", "err", err, "until", p.Leaf().NotAfter)
		return
	}
	leaf := p.Leaf()
	p.warned = time.Time{}
	p.opts.Log.Info("using a certificate", "file", p.opts.Cert, "serial", leaf.SerialNumber.Text(16), "from", leaf.NotBefore, "until", leaf.NotAfter)
}

func (p *Pair) take(cert, key []byte) error {
	c, err := parse(cert, key)
	if err == nil && !mutant.On(mutant.UnfitCertificate) {
		err = checkValidity(c.Leaf, p.opts.Now())
	}
	if err != nil {
		return p.withPaths(err)
	}
	p.current.Store(c)
	return nil
}

// warn logs, at most once per warnEvery, that the certificate expires soon or is not valid now.
func (p *Pair) warn() {
	leaf, now := p.Leaf(), p.opts.Now()
	left := leaf.NotAfter.Sub(now)
	err := checkValidity(leaf, now)
	if err == nil && left > min(warnBefore, leaf.NotAfter.Sub(leaf.NotBefore)/5) || now.Sub(p.warned).Abs() < warnEvery {
		return
	}
	p.warned = now
	if err != nil {
		p.opts.Log.Error("clients will refuse the certificate of tenants' ports: renew it", "err", p.withPaths(err))
		return
	}
	p.opts.Log.Warn("the certificate of tenants' ports is about to expire: renew it", "file", p.opts.Cert, "until", leaf.NotAfter, "left", left.Round(time.Minute))
}
