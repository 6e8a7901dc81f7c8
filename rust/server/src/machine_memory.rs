//! The memory that this process may use: of the machine, or of the smallest limit of its control groups.
//! A service of systemd and a job of Slurm have limits in nested groups.

use std::path::{Component, Path, PathBuf};

/// Assumed memory when its size is unknown.
const UNKNOWN_MACHINE_BYTES: u64 = 4 << 30;

/// An amount of memory, and its source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MachineMemory {
    pub(crate) bytes: u64,
    /// The file with the limit.
    pub(crate) source: PathBuf,
}

impl MachineMemory {
    /// Reads the files of Linux below `root`, which is `/` except in tests.
    pub(crate) fn read(root: &Path) -> Self {
        let meminfo = Path::new("/proc/meminfo").to_owned();
        let machine =
            Self { bytes: total(&content(root, &meminfo)).unwrap_or(UNKNOWN_MACHINE_BYTES), source: meminfo };
        let groups = content(root, Path::new("/proc/self/cgroup"));
        let limits = groups.lines().flat_map(group_files).filter_map(|source| {
            let bytes = content(root, &source).trim().parse().ok()?;
            Some(Self { bytes, source })
        });
        // Of equal limits the first: the innermost group, or the machine.
        limits.fold(machine, |least, limit| if limit.bytes < least.bytes { limit } else { least })
    }
}

fn content(root: &Path, file: &Path) -> String {
    let file = root.join(file.strip_prefix("/").unwrap_or(file));
    std::fs::read_to_string(file).unwrap_or_default()
}

/// Bytes of memory, from the text of `/proc/meminfo`.
fn total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1 << 10)
}

/// The files that may limit a group and its parents, from a line of `/proc/self/cgroup`
/// (`number:controllers:path`). In a container the path may be the host's: then only the root exists.
fn group_files(line: &str) -> Vec<PathBuf> {
    let mut fields = line.splitn(3, ':').skip(1);
    let (Some(controllers), Some(group)) = (fields.next(), fields.next()) else { return Vec::new() };
    let (mount, file) = match controllers {
        "" => ("/sys/fs/cgroup", "memory.max"),
        named if named.split(',').any(|one| one == "memory") => {
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
        }
        _ => return Vec::new(),
    };
    let names = Path::new(group).components().filter(|part| matches!(part, Component::Normal(_)));
    let inner = Path::new(mount).join(names.collect::<PathBuf>());
    let groups = inner.ancestors().take_while(|group| group.starts_with(mount));
    groups.map(|group| group.join(file)).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    const MACHINE: u64 = 8 << 30;
    /// Value of version 1 for no limit.
    const UNLIMITED: &str = "9223372036854771712\n";

    /// A root folder with these files beside `/proc/meminfo`.
    struct Root(PathBuf);

    impl Root {
        fn new(files: &[(&str, &str)]) -> Self {
            static NEXT: AtomicU64 = AtomicU64::new(0);
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let root =
                Self(std::env::temp_dir().join(format!("fastps-root-{}-{number}", std::process::id())));
            let meminfo = format!("MemTotal:       {} kB\nMemFree: 5 kB\n", MACHINE >> 10);
            for (file, text) in files.iter().chain([&("proc/meminfo", meminfo.as_str())]) {
                let file = root.0.join(file);
                std::fs::create_dir_all(file.parent().unwrap()).unwrap();
                std::fs::write(file, text).unwrap();
            }
            root
        }

        fn read(&self) -> (u64, String) {
            let MachineMemory { bytes, source } = MachineMemory::read(&self.0);
            (bytes, source.display().to_string())
        }
    }

    impl Drop for Root {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn without_groups_it_is_the_machine() {
        let machine = (MACHINE, "/proc/meminfo".to_owned());
        assert_eq!(Root::new(&[]).read(), machine);
        assert_eq!(Root::new(&[("proc/self/cgroup", "nonsense\n7\n:\n0::/none\n")]).read(), machine);
        let unlimited =
            [("proc/self/cgroup", "0::/user.slice\n"), ("sys/fs/cgroup/user.slice/memory.max", "max\n")];
        assert_eq!(Root::new(&unlimited).read(), machine);
        let larger = [("proc/self/cgroup", "0::/\n"), ("sys/fs/cgroup/memory.max", "9999999999999\n")];
        assert_eq!(Root::new(&larger).read(), machine);
    }

    #[test]
    fn the_smallest_limit_of_all_groups_counts() {
        for (inner, middle, outer, smallest) in
            [("1000", "max", "max", 1000), ("3000", "2000", "max", 2000), ("max", "5000", "4000", 4000)]
        {
            let root = Root::new(&[
                ("proc/self/cgroup", "0::/system.slice/slurm.scope/job_7\n"),
                ("sys/fs/cgroup/system.slice/slurm.scope/job_7/memory.max", inner),
                ("sys/fs/cgroup/system.slice/slurm.scope/memory.max", middle),
                ("sys/fs/cgroup/system.slice/memory.max", outer),
                ("sys/fs/cgroup/other/memory.max", "1"),
            ]);
            let (bytes, source) = root.read();
            assert_eq!(bytes, smallest);
            assert!(source.starts_with("/sys/fs/cgroup/system.slice"), "{source}");
        }
    }

    #[test]
    fn groups_of_version_1_count_too() {
        let root = Root::new(&[
            ("proc/self/cgroup", "12:cpu,cpuacct:/slurm/job\n5:hugetlb,memory:/slurm/uid_0/job\n0::/x\n"),
            ("sys/fs/cgroup/memory/slurm/uid_0/job/memory.limit_in_bytes", UNLIMITED),
            ("sys/fs/cgroup/memory/slurm/uid_0/memory.limit_in_bytes", "123456\n"),
            ("sys/fs/cgroup/memory/slurm/memory.limit_in_bytes", "234567\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", UNLIMITED),
        ]);
        let expected = "/sys/fs/cgroup/memory/slurm/uid_0/memory.limit_in_bytes";
        assert_eq!(root.read(), (123_456, expected.to_owned()));
    }

    #[test]
    fn in_a_container_the_root_has_the_limit() {
        for path in ["/docker/0123", "/../../outside", "/"] {
            let cgroup = format!("0::{path}\n");
            let files = [("proc/self/cgroup", cgroup.as_str()), ("sys/fs/cgroup/memory.max", "77\n")];
            assert_eq!(Root::new(&files).read(), (77, "/sys/fs/cgroup/memory.max".to_owned()));
        }
    }
}
