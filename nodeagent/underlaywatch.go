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

// errUnderlayChanged ends the agent, so that its supervisor starts it again with the new underlay. The underlay's
// address is part of every VXLAN device, and an agent compares all VXLAN devices with the wanted state when it starts.
// Guests keep running meanwhile.
var errUnderlayChanged = errors.New("the underlay changed, the agent must be started again")

// underlayWatch detects that the underlay of the host is no longer the one that the agent found when it started.
type underlayWatch struct {
	config *Config
	// used is the underlay of the VPCs. It is the zero value if the host had none when the agent started.
	used underlay
	log  *slog.Logger

	found   underlay // the underlay that the last check found, if it differs from used
	missing bool     // the last check found none, which was logged
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

// check returns an error that wraps errUnderlayChanged if two consecutive checks find the same underlay and it differs
// from w.used. The address of w.used stays the underlay while its interface has the address, also if the interface gets
// further addresses. If the host has no underlay, check logs a warning once, and the VPCs keep w.used.
func (w *underlayWatch) check(ctx context.Context) error {
	found, err := w.find(ctx)
	if ctx.Err() != nil {
		return nil
	}
	// The text of the error can change with each check, for example with the state of the control plane's members.
	if err != nil && !w.missing {
		w.log.Warn("cannot find the underlay; the VPCs of this host keep the one that they have, if any", "err", err)
	}
	w.missing = err != nil
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

// find returns the present underlay: w.used with its present MTU while the host has its address, or else the one that
// findUnderlay finds.
func (w *underlayWatch) find(ctx context.Context) (underlay, error) {
	if w.used.vtep.IsValid() && w.hasAddress() {
		return withMTU(w.config, w.used)
	}
	return findUnderlay(ctx, w.config)
}

// hasAddress reports whether the host still has the address of w.used, on the interface of w.used if its name is known,
// or else on any interface.
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
