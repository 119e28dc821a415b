package facts

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestFindFirmware checks that the first descriptor by file name is chosen whose firmware has the requested features
// and is installed.
func TestFindFirmware(t *testing.T) {
	const machine = "pc-q35-7.2"
	shared, local := t.TempDir(), t.TempDir()
	file := func(name string) string {
		path := filepath.Join(t.TempDir(), name)
		require.NoError(t, os.WriteFile(path, nil, 0o600))
		return path
	}
	code, vars, secure, keys := file("code"), file("vars"), file("secure"), file("keys")
	describe := func(dir, name, code, vars, machines, features string) {
		quoted := `"` + strings.ReplaceAll(features, " ", `","`) + `"`
		text := fmt.Sprintf(`{"interface-types": ["uefi"], "mapping": {"device": "flash", "executable": {"filename": %q, "format": "raw"},
			"nvram-template": {"filename": %q, "format": "raw"}}, "targets": [{"architecture": "x86_64", "machines": [%q]}],
			"features": [%s]}`, code, vars, machines, quoted)
		require.NoError(t, os.WriteFile(filepath.Join(dir, name+".json"), []byte(text), 0o600))
	}
	find := func(secure bool) Firmware { return findFirmware([]string{shared, local}, machine, "x86_64", secure) }
	require.Equal(t, "no UEFI firmware for pc-q35-7.2 is installed", find(false).Problem)
	require.Equal(t, "no UEFI firmware with secure boot and enrolled keys for pc-q35-7.2 is installed", find(true).Problem)

	describe(shared, "10-other-machine", code, vars, "pc-i440fx-*", "acpi-s3")
	describe(shared, "20-absent", code+".absent", vars, "pc-q35-*", "acpi-s3")
	describe(shared, "30-without-keys", secure, vars, "pc-q35-*", "requires-smm secure-boot")
	require.NoError(t, os.WriteFile(filepath.Join(shared, "40-broken.json"), []byte("{"), 0o600))
	require.NotEmpty(t, find(false).Problem)
	require.NotEmpty(t, find(true).Problem)

	describe(shared, "50-keys", secure, keys, "pc-q35-*", "enrolled-keys requires-smm secure-boot")
	describe(shared, "60-plain", code, vars, "pc-q35-*", "acpi-s3")
	require.Equal(t, Firmware{Code: code, Variables: vars}, find(false))
	require.Equal(t, Firmware{Code: secure, Variables: keys}, find(true))
	require.NotEmpty(t, findFirmware([]string{shared}, machine, "aarch64", false).Problem)

	own := file("own")
	describe(local, "60-plain", own, vars, "pc-q35-*", "acpi-s3")
	require.Equal(t, own, find(false).Code, "an operator's descriptor replaces the one of the same name")
}
