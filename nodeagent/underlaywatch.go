package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"time"
)

// watchUnderlayEvery is the time between two checks of the underlay.
const watchUnderlayEvery = 10 * time.Second

// errUnderlayChanged ends the agent, so that its supervisor starts it again with the new underlay. The address of the
// underlay is part of every VXLAN device, and an agent that starts compares all of them anyway. Guests run on
// meanwhile.
var errUnderlayChanged = errors.New("the underlay changed, the agent must be started again")

// underlayWatch notices that the host has another underlay than when the agent started.
type underlayWatch struct {
	config *Config
	// used is the underlay of the VPCs. It is the zero value if the host had none when the agent started.
	used underlay
	log  *slog.Logger

	found   underlay // by the last check, if it is not used
	problem string   // logged by the last check
}

// run checks the underlay until ctx ends, or returns errUnderlayChanged.
func (w *underlayWatch) run(ctx context.Context) error {
	tick := time.NewTicker(watchUnderlayEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			if err := w.check(ctx); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// check returns an error that wraps errUnderlayChanged if it finds the same other underlay as the check before. An
// address that the interface still has stays the underlay, also when the interface gets further addresses. Without an
// underlay the VPCs keep the one that is used: check logs this once.
func (w *underlayWatch) check(ctx context.Context) error {
	found, err := w.find(ctx)
	if ctx.Err() != nil {
		return nil
	}
	problem := ""
	if err != nil {
		problem = err.Error()
	}
	if problem != "" && problem != w.problem {
		w.log.Warn("cannot find the underlay; the VPCs of this host keep the one that they have, if any", "err", err)
	}
	w.problem = problem
	if err != nil || found == w.used {
		w.found = underlay{}
		return nil
	}
	if found != w.found {
		w.found = found
		return nil
	}
	if w.used == (underlay{}) {
		return fmt.Errorf("the host has an underlay now, %s: %w", found, errUnderlayChanged)
	}
	return fmt.Errorf("the underlay was %s and is %s: %w", w.used, found, errUnderlayChanged)
}

// find returns the present underlay: the one that is used, with its present MTU, as long as the host has its address.
func (w *underlayWatch) find(ctx context.Context) (underlay, error) {
	if w.used.vtep.IsValid() && w.hasAddress() {
		return withMTU(w.config, w.used)
	}
	return findUnderlay(ctx, w.config)
}

// hasAddress reports whether the interface of the underlay has its address. Without the name of an interface any
// interface may have it.
func (w *underlayWatch) hasAddress() bool {
	if w.used.device == "" {
		_, err := mtuOf(w.used.vtep)
		return err == nil
	}
	device, err := net.InterfaceByName(w.used.device)
	if err != nil {
		return false
	}
	addrs, err := addressesOf(device)
	return err == nil && slices.Contains(addrs, w.used.vtep)
}
