package certfile

import (
	"context"
	"crypto/sha256"
	"os"
	"time"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

const (
	// Every is the time between two looks at the files.
	Every = 5 * time.Second
	// warnBefore is how long before its end a certificate is warned of: certificates of 90 days are renewed 30 days
	// before, so that there is something wrong by then. One of a shorter life is warned of in its last fifth.
	warnBefore = 14 * 24 * time.Hour
	// warnEvery is the time between two such warnings.
	warnEvery = 12 * time.Hour
)

// Run looks at the files until ctx ends: every so often, and at once whenever hurry says so.
func (p *Pair) Run(ctx context.Context, hurry <-chan os.Signal) {
	tick := time.NewTicker(Every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-hurry:
			p.seen = [sha256.Size]byte{} // whoever asks is told, also of what was said before
			p.look()
		case <-tick.C:
			p.look()
		}
	}
}

// look takes what the files hold when it is new and good.
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
		p.opts.Log.Warn("the new certificate is not used, the one before goes on", "err", err, "until", p.Leaf().NotAfter)
		return
	}
	leaf := p.Leaf()
	p.warned = time.Time{}
	p.opts.Log.Info("using a certificate", "file", p.opts.Cert, "serial", leaf.SerialNumber.Text(16), "from", leaf.NotBefore, "until", leaf.NotAfter)
}

func (p *Pair) take(cert, key []byte) error {
	c, err := parse(cert, key)
	if err == nil && !mutant.On(mutant.UnfitCertificate) {
		err = dated(c.Leaf, p.opts.Now())
	}
	if err != nil {
		return p.named(err)
	}
	p.current.Store(c)
	return nil
}

// warn says that the certificate is about to end, or is not good now.
func (p *Pair) warn() {
	leaf, now := p.Leaf(), p.opts.Now()
	left := leaf.NotAfter.Sub(now)
	err := dated(leaf, now)
	if err == nil && left > min(warnBefore, leaf.NotAfter.Sub(leaf.NotBefore)/5) || now.Sub(p.warned).Abs() < warnEvery {
		return
	}
	p.warned = now
	if err != nil {
		p.opts.Log.Error("clients will refuse the certificate of tenants' ports: renew it", "err", p.named(err))
		return
	}
	p.opts.Log.Warn("the certificate of tenants' ports is about to expire: renew it", "file", p.opts.Cert, "until", leaf.NotAfter, "left", left.Round(time.Minute))
}
