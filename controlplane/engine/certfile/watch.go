package certfile

import (
	"context"
	"crypto/sha256"
	"os"
	"time"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

const (
	// Every is the interval at which Run reads the certificate file and the key file.
	Every = 5 * time.Second
	// warnBefore is how long before the certificate's expiry warnings begin. Certificates of 90 days are usually
	// renewed 30 days before they expire, so 14 days before expiry a renewal has already failed. If a fifth of the
	// certificate's validity period is shorter than warnBefore, warnings begin in the last fifth.
	warnBefore = 14 * 24 * time.Hour
	// warnEvery is the interval between two warnings about expiry.
	warnEvery = 12 * time.Hour
)

// Run reads the two files at the interval Every, and also at each signal on the channel hurry, until ctx ends. If they
// contain a new valid certificate and key, servers use these from then on. An invalid pair is logged and not used.
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

// look reads the files. If they have changed and are valid, servers use the new certificate and key from then on. If
// they have changed and are not valid, look logs the error, and the previous pair stays in use.
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

// warn logs that the certificate in use expires soon or is not valid now. It does so at most once per warnEvery.
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
