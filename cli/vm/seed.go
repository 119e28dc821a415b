package vm

import (
	"fmt"
	"os"
	"strings"

	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/shared/cloudinit"
)

// Metadata keys for the guest; see vmcontroller.v1.CreateVmRequest.metadata.
const (
	sshKeysMetadata  = "trivet/ssh-keys"
	userDataMetadata = "trivet/user-data"
)

// addSeed reads the files of --ssh-key and --user-data into the metadata of a request.
func (f *createFlags) addSeed(metadata map[string]string) error {
	var keys strings.Builder
	for _, path := range f.sshKeys {
		text, err := readSeedFile("--ssh-key", path, cloudinit.MaxSSHKeys)
		if err != nil {
			return err
		}
		lines, err := publicKeys("--ssh-key "+path, text)
		if err != nil {
			return err
		}
		for _, line := range lines {
			fmt.Fprintln(&keys, line)
		}
	}
	if keys.Len() > 0 {
		metadata[sshKeysMetadata] = keys.String()
	}
	if f.userData == "" {
		return nil
	}
	text, err := readSeedFile("--user-data", f.userData, cloudinit.MaxUserData)
	if err != nil {
		return err
	}
	if err := cloudinit.CheckUserData([]byte(text)); err != nil {
		return session.Usagef("--user-data %s: %v", f.userData, err)
	}
	metadata[userDataMetadata] = text
	return nil
}

// publicKeys returns the public keys in the lines of text, without comments and empty lines. Its errors begin with from.
func publicKeys(from, text string) (keys []string, err error) {
	if strings.Contains(text, "PRIVATE KEY") {
		return nil, session.Usagef("%s: this is a private key: give the public one, which often ends in .pub", from)
	}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if err := cloudinit.CheckSSHKey(line); err != nil {
			return nil, session.Usagef("%s: a key %v", from, err)
		}
		keys = append(keys, line)
	}
	return keys, nil
}

func readSeedFile(from, path string, limit int64) (string, error) {
	info, err := os.Stat(path)
	if err != nil {
		return "", fmt.Errorf("%s: %w", from, err)
	}
	if info.Size() > limit {
		return "", session.Usagef("%s %s: has %d bytes; at most %d are possible", from, path, info.Size(), limit)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("%s: %w", from, err)
	}
	return string(text), nil
}
