//! Nobody outlives the tests: one shell kills what is left when this process ends, however it ends.
//!
//! Children run in process groups of their own, so Ctrl-C on the tests does not reach them, and a test process that is
//! itself killed runs no destructor. Therefore a small shell holds the reading end of a pipe whose writing end is in this
//! process alone. It is told each group that starts and each that is gone; at the end of the pipe it kills the groups
//! that are left and removes the directories it was told to. (Asking the kernel to kill a child with its parent is no way:
//! that follows the *thread* that started it.)

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::failure::{Failure, Outcome};

const SCRIPT: &str = r#"
trap '' INT TERM HUP
groups= ; tab=$(printf '\t')
while IFS=$tab read -r verb what; do
    case $verb in
        start) groups="$groups $what" ;;
        gone) kept= ; for g in $groups; do [ "$g" = "$what" ] || kept="$kept $g"; done; groups=$kept ;;
        remove) set -- "$@" "$what" ;;
    esac
done
for g in $groups; do kill -s KILL -- "-$g" 2>/dev/null; done
[ $# -eq 0 ] && exit 0
sleep 1
rm -rf -- "$@"
"#;

fn pipe() -> Outcome<&'static Mutex<ChildStdin>> {
    static PIPE: OnceLock<Result<Mutex<ChildStdin>, String>> = OnceLock::new();
    PIPE.get_or_init(|| {
        let mut shell = Command::new("sh")
            .args(["-c", SCRIPT, "guard"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .map_err(|error| format!("cannot start `sh` to guard the tests' children: {error}"))?;
        shell.stdin.take().map(Mutex::new).ok_or_else(|| "the guard has no standard input".to_owned())
    })
    .as_ref()
    .map_err(Failure::new)
}

fn tell(verb: &str, what: &str) -> Outcome {
    let mut pipe = pipe()?.lock().unwrap_or_else(PoisonError::into_inner);
    pipe.write_all(format!("{verb}\t{what}\n").as_bytes())
        .map_err(|error| Failure::from(error).during("speak to the guard of the tests' children"))
}

/// From now on the end of this process is the end of that process group.
///
/// # Errors
///
/// When the guard cannot be started or has died.
pub(crate) fn started(group: u32) -> Outcome {
    tell("start", &group.to_string())
}

/// The group is gone and its number may be another's soon.
pub(crate) fn gone(group: u32) {
    // A guard that has died cannot kill a stranger either.
    let _ = tell("gone", &group.to_string());
}

/// Removes the directory when this process has ended.
///
/// # Errors
///
/// As [`started`].
pub(crate) fn remove_at_the_end(directory: &Path) -> Outcome {
    tell("remove", &directory.display().to_string())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::wait::eventually;

    /// The script alone, as its own process: what it does at the end of its input.
    #[tokio::test]
    async fn what_is_left_is_killed_at_the_end_of_the_pipe_and_what_is_gone_is_left_alone() {
        let sleeper = || Command::new("sleep").arg("60").process_group(0).spawn().unwrap();
        let (mut left, mut forgotten) = (sleeper(), sleeper());
        let directory = std::env::temp_dir().join(format!("baton guard {}", uuid::Uuid::new_v4()));
        std::fs::create_dir(&directory).unwrap();

        let mut shell =
            Command::new("sh").args(["-c", SCRIPT, "guard"]).stdin(Stdio::piped()).spawn().unwrap();
        let mut pipe = shell.stdin.take().unwrap();
        writeln!(pipe, "start\t{}\nstart\t{}\ngone\t{}", left.id(), forgotten.id(), forgotten.id()).unwrap();
        writeln!(pipe, "remove\t{}", directory.display()).unwrap();
        drop(pipe);

        eventually("the guard to end", Duration::from_secs(10), async || match shell.try_wait()? {
            Some(_) => Ok(()),
            None => crate::fail!("it runs"),
        })
        .await
        .unwrap();
        eventually("the one that was left to die", Duration::from_secs(5), async || {
            match left.try_wait()? {
                Some(_) => Ok(()),
                None => crate::fail!("it lives"),
            }
        })
        .await
        .unwrap();
        assert!(forgotten.try_wait().unwrap().is_none(), "a group that was reported gone was killed");
        assert!(!directory.exists());
        forgotten.kill().unwrap();
        forgotten.wait().unwrap();
    }
}
