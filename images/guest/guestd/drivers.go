package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// always lists the modules that no device's modalias requests: the power button's event device belongs to the input
// layer, which requests its module too late.
var always = [...]string{"button", "evdev"}

// buses lists the buses, which are searched in this order and repeatedly until nothing new is found: a driver on one
// bus creates devices on the next.
var buses = [...]string{"pci", "acpi", "virtio", "scsi"}

// catalogue holds depmod's index of the modules in the image: the modules for each device, and the dependencies of each
// module.
type catalogue struct {
	dir string

	mu      sync.Mutex
	aliases []alias
	files   map[string]string   // module name -> file below dir
	needs   map[string][]string // file -> files it needs, to be loaded from last to first
	loaded  map[string]bool     // by file; includes failed ones, so that each is tried once
	asked   map[string]bool     // modaliases that were looked up
}

// alias maps devices whose modalias matches the pattern to a module. The literal beginning of the pattern is kept
// separately: it decides almost every comparison, and there are thousands at each boot.
type alias struct{ literal, pattern, module string }

// loadCatalogue loads the catalogue of the running kernel. An image without one has no modules, and a machine with it
// then shows no disks.
func loadCatalogue() *catalogue {
	var uts unix.Utsname
	_ = unix.Uname(&uts) // cannot fail with a valid address
	c := &catalogue{
		dir:    "/lib/modules/" + unix.ByteSliceToString(uts.Release[:]),
		loaded: make(map[string]bool),
		asked:  make(map[string]bool),
	}
	c.files, c.needs = parseDep(readText(c.dir + "/modules.dep"))
	c.aliases = parseAliases(readText(c.dir + "/modules.alias"))
	return c
}

// parseDep parses modules.dep: "kernel/a.ko: kernel/b.ko kernel/c.ko".
func parseDep(text string) (files map[string]string, needs map[string][]string) {
	files, needs = make(map[string]string), make(map[string][]string)
	for line := range strings.Lines(text) {
		file, rest, ok := strings.Cut(line, ":")
		if !ok {
			continue
		}
		files[moduleName(file)] = file
		needs[file] = strings.Fields(rest)
	}
	return files, needs
}

// parseAliases parses modules.alias: "alias pci:v00001AF4d*sv*sd*bc*sc*i* virtio_pci".
func parseAliases(text string) []alias {
	var list []alias
	for line := range strings.Lines(text) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "alias" {
			a := alias{literal: f[1], pattern: f[1], module: f[2]}
			if i := strings.IndexAny(f[1], "*?["); i >= 0 {
				a.literal = f[1][:i]
			}
			list = append(list, a)
		}
	}
	return list
}

// moduleName returns the kernel's name of a module file: without directory and suffix, and with underscores for dashes.
func moduleName(file string) string {
	return strings.ReplaceAll(strings.TrimSuffix(path.Base(file), ".ko"), "-", "_")
}

// wanted returns the modules for a device with this modalias.
func (c *catalogue) wanted(modalias string) []string {
	var list []string
	for _, a := range c.aliases {
		if !strings.HasPrefix(modalias, a.literal) {
			continue
		}
		if ok, err := path.Match(a.pattern, modalias); ok && err == nil {
			list = append(list, a.module)
		}
	}
	return list
}

// coldplug loads the drivers of every existing device. When it returns, their disks exist too: the kernel completes the
// loading of a module only after the probes that the module started.
func (c *catalogue) coldplug() []error {
	var errs []error
	for _, name := range always {
		errs = append(errs, c.load(name)...)
	}
	for found := true; found; {
		found = false
		for _, bus := range buses {
			names, err := filepath.Glob("/sys/bus/" + bus + "/devices/*/modalias")
			if err != nil {
				continue
			}
			for _, name := range names {
				news, problems := c.ask(readText(name))
				found = found || news
				errs = append(errs, problems...)
			}
		}
	}
	return errs
}

// ask loads the modules for a device with this modalias, and reports whether the modalias was new.
func (c *catalogue) ask(modalias string) (news bool, errs []error) {
	c.mu.Lock()
	if modalias == "" || c.asked[modalias] {
		c.mu.Unlock()
		return false, nil
	}
	c.asked[modalias] = true
	c.mu.Unlock()
	for _, name := range c.wanted(modalias) {
		errs = append(errs, c.load(name)...)
	}
	return true, errs
}

// load loads a module after its dependencies. A name that the image does not have is no error: the driver is built in.
func (c *catalogue) load(name string) []error {
	c.mu.Lock()
	defer c.mu.Unlock()
	file, ok := c.files[name]
	if !ok {
		return nil
	}
	var errs []error
	needs := c.needs[file]
	for i := len(needs) - 1; i >= 0; i-- {
		errs = append(errs, c.insert(needs[i]))
	}
	errs = append(errs, c.insert(file))
	if err := errors.Join(errs...); err != nil {
		return []error{fmt.Errorf("load module %s: %w", name, err)}
	}
	return nil
}

func (c *catalogue) insert(file string) error {
	if c.loaded[file] {
		return nil
	}
	c.loaded[file] = true
	f, err := os.Open(c.dir + "/" + file)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("insert %s: %w", file, err)
	}
	return nil
}
