package ipsec

import (
	"context"
	"crypto/rand"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netns"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
)

// MissingFeatures returns what the host's kernel lacks for encryption, each with the option of the kernel's
// configuration or the module that provides it, in words for an operator. It makes policies and states in a network
// namespace of its own, which disappears with the call. An error means that the check itself failed.
func MissingFeatures(ctx context.Context) (missing []string, err error) {
	err = nsthread.Do(func() error {
		ns, err := netns.New()
		if err != nil {
			return fmt.Errorf("make a network namespace: %w", err)
		}
		defer ns.Close()
		k, err := openKernel("/proc/thread-self/ns/net")
		if err != nil {
			missing = append(missing, "IPsec (CONFIG_XFRM_USER, module xfrm_user): "+joinedText(err))
			return nil
		}
		defer k.close()
		for _, f := range features {
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := f.change().apply(k); err != nil {
				missing = append(missing, fmt.Sprintf("%s (%s): %s", f.name, f.option, joinedText(err)))
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("check kernel features: %w", err)
	}
	return missing, nil
}

// features lists the kernel features that encryption over IPv4 and IPv6 needs. Each entry has the feature's name, the
// kernel options that provide it, and a change of the kernel's state that fails without it.
var features = []struct {
	name, option string
	change       func() change
}{
	{"policies of IPsec", "CONFIG_XFRM", tryPolicy("192.0.2.1")},
	{"ESP with AES-GCM over IPv4", "CONFIG_INET_ESP, CONFIG_CRYPTO_GCM, CONFIG_CRYPTO_SEQIV, modules esp4, gcm and seqiv",
		tryState("192.0.2.1", "192.0.2.2")},
	{"ESP with AES-GCM over IPv6", "CONFIG_INET6_ESP, CONFIG_CRYPTO_GCM, CONFIG_CRYPTO_SEQIV, modules esp6, gcm and seqiv",
		tryState("2001:db8::1", "2001:db8::2")},
}

func tryPolicy(vtep string) func() change {
	return func() change { return addPolicy{policy: wantedPolicy(in, netip.MustParseAddr(vtep))} }
}

func tryState(source, destination string) func() change {
	return func() change {
		c := addState{id: stateID{netip.MustParseAddr(destination), 256}, source: netip.MustParseAddr(source), out: true}
		rand.Read(c.key[:])
		return c
	}
}
